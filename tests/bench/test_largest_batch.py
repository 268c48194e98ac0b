"""The search for the largest batch: it ends near the border, from below, and tells a contender that cannot run at all."""

from typing import Any

import pytest
from bench_fixtures import task

from tapeless.bench.largest_batch import MOST, largest_batch, with_rows
from tapeless.bench.task import Task
from tapeless.errors import WorkerError


class Device:
    """Room for so many rows of a byte each, beside what a model takes itself."""

    def __init__(self, rows: int, model: int = 0):
        self.room, self.model, self.tries = rows + model, model, []

    def start(self, asked: Task) -> "Worker":
        self.tries.append(asked.train.batch_size)
        return Worker(asked.train.batch_size + self.model, self.room)

    def largest(self, begin: int = 1) -> int:
        return largest_batch(with_rows(task(), begin), self.room, self.start)


class Worker:
    def __init__(self, peak: int, room: int):
        self.peak, self.fits = peak, peak <= room

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        if do == "steps" and not self.fits:
            raise WorkerError("out of memory")
        return {"peak": self.peak, "before": 0, "result": 1.0, "seconds": [1.0], "others": 0.0}

    def since_start(self) -> float:
        return 0.0

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: Any) -> None:
        pass


@pytest.mark.parametrize("model", [0, 10, 500])
@pytest.mark.parametrize("begin", [1, 32, 5000])
@pytest.mark.parametrize("room", [1, 2, 3, 7, 8, 9, 100, 1000, 4095])
def test_within_an_eighth_of_the_border_and_never_beyond(room: int, begin: int, model: int):
    device = Device(room, model)
    found = device.largest(begin)
    assert room * 8 / 9 <= found <= room
    assert found in device.tries
    assert len(device.tries) <= 30


def test_a_few_tries_do_where_rows_take_most_of_the_memory():
    device = Device(500, model=20)
    device.largest(32)
    assert len(device.tries) <= 5


def test_nothing_fits():
    assert Device(0).largest(32) == 0


def test_everything_fits():
    assert Device(10 * MOST).largest() == MOST
