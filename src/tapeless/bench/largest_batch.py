"""The largest batch that fits: each contender alone on the device, with other numbers of rows until the limit is known.

The search starts with the rows asked for. The memory of a batch that fits predicts how many rows do; beyond that, an eighth
more each time until a step fails, then bisection until the limit is known to an eighth. A compiler takes a minute for every
try, so there should be few. Each try is a new process, so that nothing of the one before remains.
Tested by: tests/bench/test_largest_batch.py."""

from dataclasses import replace

from tapeless.bench.side_by_side import Measured, Progress, Start, begin
from tapeless.bench.task import Task
from tapeless.errors import WorkerError

MOST = 2**16  # rows


def with_rows(task: Task, rows: int) -> Task:
    return replace(task, train=replace(task.train, batch_size=rows))


def peak_of(task: Task, start: Start) -> int:
    """Bytes; a WorkerError where two steps cannot be taken: a captured step has its memory with the second."""
    with start(task) as worker:
        begin(worker, Measured(task, 0))
        worker.ask("steps", count=2)
        return int(worker.ask("finish")["peak"])


def largest_batch(task: Task, room: int, start: Start, progress: Progress = lambda text: None) -> int:
    """Rows; 0 where not even one row works, whatever the reason. room: bytes that are free."""
    good, bad, rows = 0, MOST + 1, min(task.train.batch_size, MOST)
    while good * 9 < (bad - 1) * 8 and good < MOST:
        try:
            peak = peak_of(with_rows(task, rows), start)
        except WorkerError as error:
            progress(f"{rows} rows do not: {error}")
            bad = rows
        else:
            progress(f"{task.label}: {rows} rows fit")
            good, likely = rows, rows * room // max(peak, 1)
        between = bad <= MOST
        rows = (good + bad) // 2 if between else min(max(likely, good * 9 // 8 + 1), MOST)
    return good
