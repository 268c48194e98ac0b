"""The next batch is read ahead, and is the one that the loader has."""

import threading
from typing import Any

import numpy as np
import torch

from tapeless.data.loader import Loader
from tapeless.training.prefetch import Prefetch

TOKENS = np.arange(200, dtype=np.uint16)


def loader() -> Loader:
    return Loader(TOKENS, 8, 4, seed=1)


def same(found: tuple[torch.Tensor, ...], first_sample: int) -> bool:
    return all(torch.equal(x, y) for x, y in zip(found, loader().batch(first_sample), strict=True))


def test_a_cpu_reads_when_it_needs_a_batch():
    before = threading.active_count()
    batches = Prefetch(loader(), torch.device("cpu"))
    assert all(same(batches.at(sample), sample) for sample in (0, 4, 8, 40))
    assert threading.active_count() == before
    batches.close()


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
