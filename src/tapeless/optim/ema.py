"""An exponential moving average of the weights (EMA), which is less noisy than the last weights.

    a_t = d_t a_(t-1) + (1 - d_t) p_t        d_t = min(decay, (t - 1) / (t + 8))        t = 1 after the first update
With a constant decay the initial weights would dominate the average for the first 1/(1 - decay) steps; with the usual
correction (division by 1 - decay^t) the average would be the plain mean of all weights so far, early ones included, which are
nearly as bad. So the decay rises: until (t - 1) / (t + 8) reaches it, p_i has a weight that grows as i^8, the mean age is a
tenth of the run, and the initial weights have weight 0; after about 9 / (1 - decay) steps it is the usual EMA. The decay is a
function of t, so a resume needs only the average. One flat buffer, in the dtype of the parameters (float32 or float64).
Tested by: tests/optim/test_ema.py, tests/levels/update_identities.py (L6) and tests/levels/training.py (L4, L5)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from tapeless.optim.flat import flat_buffer, named_views

EMA = "ema"  # its name in a checkpoint
FORGETS = 8  # the power of i above
SWAPPED = 2**20  # elements swapped at a time


def decay_at(t: int, decay: float) -> float:
    return min(decay, (t - 1) / (t + FORGETS))


class Ema:
    def __init__(self, params: Mapping[str, Tensor], decay: float):
        """params: the trainable ones, which are at the start of the flat buffer."""
        end = max(view.storage_offset() + view.numel() for view in params.values())
        self.params, self.decay, self._views = flat_buffer(params)[:end], decay, params
        self.average = torch.empty_like(self.params)  # (n,)
        self.begin()

    def begin(self) -> None:
        """Start from the current weights."""
        self.average.copy_(self.params)

    def update(self, t: int) -> None:
        """Include the weights after update t. One in-place operation, queued after the update, whether kernel or graph."""
        self.average.lerp_(self.params, 1 - decay_at(t, self.decay))

    def named(self) -> dict[str, Tensor]:
        """The average by parameter name, as views."""
        return named_views(self.average, self._views)

    @contextmanager
    def as_weights(self) -> Iterator[None]:
        """Inside, the model's weights are the average; afterwards both are restored to the bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        """In chunks, without a third buffer."""
        for p, a in zip(self.params.split(SWAPPED), self.average.split(SWAPPED), strict=True):
            before = p.clone()
            p.copy_(a)
            a.copy_(before)
