"""The search for the largest batch: it ends near the border, from below, and tells a contender that cannot run at all."""

from typing import Any

import pytest
from bench_fixtures import task

from tapeless.bench.largest_batch import MOST, largest_batch
from tapeless.bench.task import Task
from tapeless.errors import WorkerError


class Device:
    """Room for so many rows."""

    def __init__(self, room: int):
        self.room, self.tries = room, []

    def start(self, asked: Task) -> "Worker":
        self.tries.append(asked.train.batch_size)
        return Worker(asked.train.batch_size <= self.room)


class Worker:
    def __init__(self, fits: bool):
        self.fits = fits

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        if do == "steps" and not self.fits:
            raise WorkerError("out of memory")
        return {"before": 0, "result": 1.0, "seconds": [1.0], "others": 0.0}

    def since_start(self) -> float:
        return 0.0

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: Any) -> None:
        pass


@pytest.mark.parametrize("room", [1, 2, 3, 7, 8, 9, 100, 1000, 4095])
def test_within_an_eighth_of_the_border_and_never_beyond(room: int):
    device = Device(room)
    found = largest_batch(task(), device.start)
    assert room * 8 / 9 <= found <= room
    assert found in device.tries
    assert len(device.tries) <= 20


def test_nothing_fits():
    assert largest_batch(task(), Device(0).start) == 0


def test_everything_fits():
    assert largest_batch(task(), Device(10 * MOST).start) == MOST
