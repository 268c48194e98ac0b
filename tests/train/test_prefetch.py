"""The next batch is read ahead, and is the one that the loader has."""

import threading
from typing import Any

import numpy as np
import torch

from tapeless.data.loader import Loader
from tapeless.training import prefetch
from tapeless.training.prefetch import Prefetch

TOKENS = np.arange(200, dtype=np.uint16)


def loader() -> Loader:
    return Loader(TOKENS, 8, 4, seed=1)


def same(found: tuple[torch.Tensor, ...], first_sample: int) -> bool:
    return all(torch.equal(x, y) for x, y in zip(found, loader().batch(first_sample), strict=True))


def test_a_cpu_reads_several_batches_at_a_time_without_a_thread(monkeypatch: Any):
    monkeypatch.setattr(prefetch, "TOGETHER", 3 * 4 * 8 + 7)  # three batches
    before, own = threading.active_count(), loader()
    reads: list[tuple[int, int]] = []
    rows = own.rows
    monkeypatch.setattr(own, "rows", lambda first, count: reads.append((first, count)) or rows(first, count))
    batches = Prefetch(own, torch.device("cpu"))
    # A resume jumps, also to the middle of a batch; windows repeat in the next epoch, which begins at sample 24.
    for sample in (0, 4, 8, 12, 16, 20, 24, 0, 2, 10):
        assert same(batches.at(sample), sample), sample
    assert reads == [(0, 12), (12, 12), (24, 12), (0, 12), (2, 12)]
    assert threading.active_count() == before
    batches.close()


def test_a_batch_that_is_larger_than_what_is_read_at_a_time(monkeypatch: Any):
    monkeypatch.setattr(prefetch, "TOGETHER", 5)
    batches = Prefetch(loader(), torch.device("cpu"))
    assert all(same(batches.at(sample), sample) for sample in (0, 4, 6))


class NoDevice:
    """Stands for a device that is not a CPU: its batches are read ahead, and moving them there does nothing."""

    type = "elsewhere"


def test_the_batch_after_it_is_read_ahead_wherever_the_run_continues(monkeypatch: Any):
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self)
    batches: Any = Prefetch(loader(), NoDevice())  # type: ignore[arg-type]
    for sample in (0, 4, 8, 40, 44, 4):  # a resume jumps
        assert same(batches.at(sample), sample)
        following, future = batches._next
        assert following == sample + 4
        assert same(future.result(), following)
    batches.close()
    assert same(batches.at(12), 12)
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]
