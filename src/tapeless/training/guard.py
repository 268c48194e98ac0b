"""The spike guard: a step whose loss is far above the recent ones makes no update.

    limit = median + z scale        scale = max(1.4826 MAD, FLOOR)        over the last WINDOW losses
Median and MAD (the median absolute deviation; times 1.4826 it estimates the standard deviation of a normal distribution) are
robust to the spikes themselves. The limit is known before a step, so that a GPU can decide without synchronisation. Every loss
enters the window, also a skipped one: if the losses stay high, the limit follows after half a window, and training continues.
The window is part of a checkpoint, so that a resumed run decides the same.
Tested by: tests/train/test_guard.py, acceptance/guards.py."""

import math
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

# Of seven healthy runs, down to batches of 16 tokens, no loss had a z above 9.7 with a window of 128 (of 32: 12.7).
WINDOW = 128
LEAST = 64  # losses needed before there is a limit
FLOOR = 0.05  # nats: a small change of a nearly constant loss, as when overfitting, is not a spike
NORMAL = 1.4826


class Limit(NamedTuple):
    loss: float  # above it, the update is skipped
    median: float
    scale: float

    def exceeded_by(self, loss: float) -> str:
        deviations = (loss - self.median) / self.scale
        return f"loss {loss:.4g} is a spike, {deviations:.0f} deviations above the recent {self.median:.4g}"


NO_LIMIT = Limit(math.inf, math.nan, math.nan)


class SpikeGuard:
    def __init__(self, z: float, losses: Iterable[float] = ()):
        """z: how many deviations above the median a loss may be; 0: no limit."""
        self.z, self.losses = z, deque(losses, WINDOW)

    def limit(self) -> Limit:
        """For the loss of the next step."""
        if not self.z or len(self.losses) < LEAST:
            return NO_LIMIT
        losses = sorted(self.losses)  # so that the deviations are two sorted runs, which take less time to sort
        middle = median(losses)
        scale = max(NORMAL * median([abs(loss - middle) for loss in losses]), FLOOR)
        return Limit(middle + self.z * scale, middle, scale)

    def take(self, loss: float) -> None:
        self.losses.append(loss)
