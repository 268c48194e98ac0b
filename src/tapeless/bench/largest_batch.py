"""The largest batch that fits: each contender by itself on the device, with more and more rows until memory is short.

Rows double until a step fails; then the border is halved in until it is known to an eighth. Every try is a process of its own,
so that nothing of the one before is left. A failure counts as too large only where a smaller batch has worked.
Judged by: tests/bench/test_largest_batch.py."""

from dataclasses import replace

from tapeless.bench.side_by_side import Measured, Progress, Start, begin
from tapeless.bench.task import Task
from tapeless.errors import WorkerError

MOST = 2**16  # rows


def with_rows(task: Task, rows: int) -> Task:
    return replace(task, train=replace(task.train, batch_size=rows))


def obstacle(task: Task, start: Start) -> str | None:
    """Why two steps cannot be taken, or None: a captured step has its memory with the second."""
    try:
        with start(task) as worker:
            begin(worker, Measured(task, 0))
            worker.ask("steps", count=2)
    except WorkerError as error:
        return str(error)
    return None


def largest_batch(task: Task, start: Start, progress: Progress = lambda text: None) -> int:
    """Rows; 0 where not even one row works, whatever the reason."""
    good, bad, rows = 0, MOST + 1, 1
    while good * 9 < (bad - 1) * 8 and good < MOST:
        reason = obstacle(with_rows(task, rows), start)
        progress(f"{task.label}: {rows} rows fit" if reason is None else f"{rows} rows do not: {reason}")
        good, bad = (rows, bad) if reason is None else (good, rows)
        if good == 0:
            return 0
        rows = min(2 * rows, MOST) if bad > MOST else (good + bad) // 2
    return good
