"""What a run needs is known before it runs: the peak of its memory to 10 %, its time to 25 %.

Memory is measured of six configurations, each in a process of its own that has its kernels compiled, as the highest that stands
above the process before the model is built; and of whole runs that evaluate and write checkpoints, which are copied first, as
the highest of the process. Time: the estimate and the steps it speaks of take turns, and the median of their
ratios counts, since a machine is seldom quiet; then one whole run against what was said of it."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from claim import Claims
from training import command, scratch, tapeless, train

from tapeless.bench.process import Process, environment
from tapeless.bench.task import Task
from tapeless.config import TrainConfig, load_preset
from tapeless.estimate.memory import MIB, memory_of
from tapeless.training.metrics_log import read_metrics
from tapeless.training.run_dir import RunDir

MEMORY_BOUND, TIME_BOUND = 0.10, 0.25
MODEL, SHAPE = "llama-small", (4, 512)
POLICIES = ("none", "cheap", "full")
DTYPES = ("float32", "bfloat16")
TIMED = {  # preset, rows, length, dtype -> steps in a turn; the last is too long to be measured but by its first layers
    ("llama-tiny", 16, 64, "float32"): 100,
    ("llama-small", 2, 256, "bfloat16"): 10,
    ("llama-small", 4, 512, "float32"): 3,
    ("llama-base", 2, 256, "float32"): 2,
}
RUNS = {"llama-tiny": (16, 64), "llama-small": (4, 256)}  # rows, length
SAVING = ["--max-steps", "9", "--eval-every", "3", "--save-every", "4", "--no-verify"]
ROUNDS = 5
RUN = ["--preset", "llama-tiny", "--batch-size", "16", "--max-steps", "1500", "--eval-every", "300", "--no-verify"]


def measured_memory(task: Task) -> tuple[int, int]:
    """Bytes above the process before the model is built, and of the whole process."""
    with Process(task, environment(task, None)) as worker:
        before = worker.ask("build", task=task.as_json())["before"]
        worker.ask("first")
        worker.ask("steps", count=2)
        peak = worker.ask("finish")["peak"]
    return peak - before, peak


def estimated_time(*words: str) -> dict[str, Any]:
    return json.loads(tapeless("estimate", *words, "--json").output.splitlines()[-1])["time"]


def check_memory(claims: Claims) -> list[dict[str, Any]]:
    rows = []
    config = load_preset(MODEL)
    for dtype in DTYPES:
        plain = TrainConfig(batch_size=SHAPE[0], seq_len=SHAPE[1], dtype=dtype, lr=1e-4, verify=False)
        measured_memory(Task("ours", config, plain))  # compiles what is not compiled yet
        for policy in POLICIES:
            task = Task("ours", config, replace(plain, recompute=policy))
            found = memory_of(config, task.train)
            predicted = found.phases["training step"] - found.parts.get("captured evaluation", 0)  # nothing is evaluated
            above, whole = measured_memory(task)
            gap = predicted / above - 1
            claims.check(
                f"{MODEL} {SHAPE[0]}x{SHAPE[1]} {dtype} {policy}: peak memory {above / MIB:.0f} MiB, predicted "
                f"{predicted / MIB:.0f}; all of the process {whole / MIB:.0f} MiB, predicted "
                f"{(predicted + found.process) / MIB:.0f}",
                bound=f"within {MEMORY_BOUND:.0%}",
                measured=f"{gap:+.1%}",
                ok=abs(gap) <= MEMORY_BOUND,
            )
            rows.append({"dtype": dtype, "policy": policy, "predicted": predicted, "measured": above, "resident": whole})
    return rows


def peak_of_run(*words: str) -> int:
    """Of the whole process, in bytes."""
    process = subprocess.Popen(command("train", "new", *words), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"the run ended with status {status}")
    return usage.ru_maxrss * 1024


def check_runs(claims: Claims, folder: Path) -> list[dict[str, Any]]:
    """A few steps with everything that holds memory between them: captured steps and evaluations, and the copy of a checkpoint
    that is being written."""
    rows = []
    data = ["--dataset-path", str(repeated_text(folder))]
    for name, (B, T) in RUNS.items():
        words = [*data, "--preset", name, "--batch-size", str(B), "--seq-len", str(T), *SAVING]
        peak_of_run(*words, "--out-dir", str(folder / f"{name}-warm"))  # compiles what is not compiled yet
        measured = peak_of_run(*words, "--out-dir", str(folder / name))
        found = json.loads(tapeless("estimate", *words, "--no-calibrate", "--json").output.splitlines()[-1])["memory"]
        predicted = found["saving"] + found["process"]
        gap = predicted / measured - 1
        claims.check(
            f"a run of {name} {B}x{T} with evaluations and checkpoints: peak of the process {measured / MIB:.0f} MiB, "
            f"predicted {predicted / MIB:.0f}",
            bound=f"within {MEMORY_BOUND:.0%}",
            measured=f"{gap:+.1%}",
            ok=abs(gap) <= MEMORY_BOUND,
        )
        rows.append({"model": name, "shape": [B, T], "predicted": predicted, "measured": measured})
    return rows


def repeated_text(folder: Path) -> Path:
    text = folder / "text.txt"
    text.write_text("every forward has its backward, and every backward has its judges\n" * 20_000)
    return text


def check_time(claims: Claims) -> list[dict[str, Any]]:
    rows = []
    for (name, B, T, dtype), steps in TIMED.items():
        task = Task("ours", load_preset(name), TrainConfig(batch_size=B, seq_len=T, dtype=dtype, lr=1e-4))
        words = ["--preset", name, "--batch-size", str(B), "--seq-len", str(T), "--dtype", dtype]
        pairs = []
        with Process(task, environment(task, None)) as worker:
            worker.ask("build", task=task.as_json())
            worker.ask("first")
            for _ in range(ROUNDS):
                found = estimated_time(*words)
                pairs.append((found["step"], median(worker.ask("steps", count=steps)["seconds"])))
        gap = median(predicted / measured for predicted, measured in pairs) - 1
        taken = median(measured for _, measured in pairs)
        claims.check(
            f"{name} {B}x{T} {dtype}: a step of {1e3 * taken:.3g} ms ({found['how'].removeprefix('measured: ')})",
            bound=f"predicted within {TIME_BOUND:.0%}, median of {ROUNDS} rounds",
            measured=f"{gap:+.1%}",
            ok=abs(gap) <= TIME_BOUND,
        )
        rows.append({"model": name, "shape": [B, T], "dtype": dtype, "pairs": pairs, "how": found["how"]})
    return rows


def check_run(claims: Claims, folder: Path) -> dict[str, Any]:
    """A whole run with its evaluations, checkpoints and samples, an estimate before it and one behind."""
    run, words = RunDir(folder / "run"), [*RUN, "--dataset-path", str(repeated_text(folder))]
    train(RunDir(folder / "warm"), *words, "--max-steps", 2)  # compiles what is not compiled yet
    before = estimated_time(*words, "--out-dir", str(run.path))["total"]
    train(run, *words)
    events = list(read_metrics(run.metrics))
    behind = estimated_time(*words, "--out-dir", str(run.path))["total"]
    taken, predicted = events[-1]["time"] - events[0]["time"], (before + behind) / 2
    claims.check(
        f"a whole run of {events[-1]['step']:,} steps, from the first to the end: {taken:.1f} s, predicted {predicted:.1f}",
        bound=f"within {TIME_BOUND:.0%}, mean of an estimate before and one behind",
        measured=f"{predicted / taken - 1:+.1%}",
        ok=abs(predicted / taken - 1) <= TIME_BOUND,
    )
    return {"measured": taken, "before": before, "behind": behind}


if __name__ == "__main__":
    claims = Claims("estimate")
    memory, times = check_memory(claims), check_time(claims)
    with scratch() as folder:
        runs, whole = check_runs(claims, folder), check_run(claims, folder)
    claims.finish(memory=memory, runs=runs, time=times, run=whole)
