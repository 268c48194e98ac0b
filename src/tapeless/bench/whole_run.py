"""A real run by the trainer, with everything that `tapeless train new` does, and where its time goes.

The command runs as a process of its own in a temporary directory, with the defaults of training; its own metrics.jsonl has the
times (training/run_time.py).
Tested by: tests/bench/test_whole_run.py."""

import subprocess
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tapeless.bench.measure import How, described
from tapeless.bench.process import environment
from tapeless.bench.task import OURS, Task
from tapeless.data.worker import PYTHON
from tapeless.errors import ConfigError, WorkerError
from tapeless.plugins import LOADED
from tapeless.training.metrics_log import read_metrics
from tapeless.training.run_config import RunConfig, toml
from tapeless.training.run_dir import RunDir
from tapeless.training.run_time import FIRST_STEPS, RunTime


def whole_runs(name: str, task: Task, steps: int, how: How) -> dict[str, Any]:
    """A run in each dtype, one after the other."""
    if steps <= FIRST_STEPS:
        raise ConfigError(f"--steps {steps}: a run is measured after its first {FIRST_STEPS} steps, which compile and capture")
    runs = {}
    for dtype in how.dtypes:
        how.progress(f"{steps:,} steps in {dtype}")
        with TemporaryDirectory(prefix="tapeless-") as folder:
            runs[dtype] = whole_run(task.by(OURS, dtype), steps, how, Path(folder))
    return {"kind": "run", **described(name, task, how), "steps": steps, "runs": runs, "busy": 0.0}


def whole_run(task: Task, steps: int, how: How, folder: Path) -> dict[str, Any]:
    run = RunDir(folder / "run")
    train = replace(task.train, max_steps=steps, epochs=None, out_dir=str(run.path), threads=how.threads)
    tables = RunConfig(task.model, train, {}).tables()
    recipe = folder / "recipe.toml"
    recipe.write_text(toml({name: values for name, values in tables.items() if name != "data"}), encoding="utf-8")
    plugins = [word for path in LOADED for word in ("--plugin", str(path))]
    command = [*PYTHON, "tapeless", "train", "new", "--config", str(recipe), *plugins]
    done = subprocess.run(command, env=environment(task, how.threads), capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise WorkerError(f"the run in {task.train.dtype} ended with status {done.returncode}: {lines[-1] if lines else ''}")
    times = RunTime()
    for event in read_metrics(run.metrics):
        times.add(event)
    found = times.found()
    assert found is not None, "a finished run of more than its first steps has times"
    return found
