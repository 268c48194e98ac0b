"""Time to the first step: cold, with nothing compiled before, and warm, in a second process that finds what the first left.

Each contender runs alone, in two new processes, with a fresh folder for everything that is compiled.
Tested by: tests/bench/test_first_step.py."""

import tempfile
from collections.abc import Callable, Sequence

from tapeless.bench.side_by_side import Handle, Measured, Progress, begin
from tapeless.bench.task import Task
from tapeless.errors import WorkerError

Start = Callable[[Task, str], Handle]  # the task, and the folder for what is compiled


def first_steps(tasks: Sequence[Task], start: Start, progress: Progress = lambda text: None) -> dict[str, dict[str, float]]:
    """Label -> seconds from the start of the process, cold and warm; a contender that cannot run has none."""
    result: dict[str, dict[str, float]] = {}
    for task in tasks:
        with tempfile.TemporaryDirectory() as caches:
            try:
                times = {kind: _once(task, start, caches) for kind in ("cold", "warm")}
            except WorkerError:
                continue  # the comparison has said why
        result[task.label] = times
        progress(f"{task.label}: first step cold {times['cold']:.1f} s, warm {times['warm']:.1f} s")
    return result


def _once(task: Task, start: Start, caches: str) -> float:
    with start(task, caches) as worker:
        measured = Measured(task, 0)
        begin(worker, measured)
        return measured.first_step_s
