"""A moving average of the weights, kept beside them: its noise is less than that of the last weights alone.

    a_t = d_t a_(t-1) + (1 - d_t) p_t        d_t = min(decay, (t - 1) / (t + 8))        t = 1 after the first update
With a decay that is constant from the start, the initial weights would be in the average for the first 1/(1 - decay) steps
and more; corrected for that (divided by 1 - decay^t), it is the plain mean of all weights so far, those of the first steps
included, which are nearly as bad. So the average forgets: until (t - 1) / (t + 8) reaches the decay, p_i has a weight that
grows as i^8, a tenth of the run is its mean age, nothing of the initial weights is in it, and from then on, about
9 / (1 - decay) steps, it is the ordinary one. It is a function of t, so a resume needs nothing but the average.
It lies in one flat buffer in the dtype of the parameters: float32, and float64 where they are.
Tested by: tests/optim/test_ema.py, tests/levels/update_identities.py (L6) and tests/levels/training.py (L4, L5)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from tapeless.optim.flat import flat_buffer, named_views

EMA = "ema"  # its name in a checkpoint
FORGETS = 8  # the power of i above
SWAPPED = 2**20  # elements that change places at a time


def decay_at(t: int, decay: float) -> float:
    return min(decay, (t - 1) / (t + FORGETS))


class Ema:
    def __init__(self, params: Mapping[str, Tensor], decay: float):
        """params: of what trains, which is the beginning of the flat buffer, or all of it."""
        end = max(view.storage_offset() + view.numel() for view in params.values())
        self.params, self.decay, self._views = flat_buffer(params)[:end], decay, params
        self.average = torch.empty_like(self.params)  # (n,)
        self.begin()

    def begin(self) -> None:
        """With the weights as they are."""
        self.average.copy_(self.params)

    def update(self, t: int) -> None:
        """Take in the weights after update t. One operation in place: it follows whatever made them, a kernel or a graph."""
        self.average.lerp_(self.params, 1 - decay_at(t, self.decay))

    def named(self) -> dict[str, Tensor]:
        """The average under the parameters' names, as views."""
        return named_views(self.average, self._views)

    @contextmanager
    def as_weights(self) -> Iterator[None]:
        """The model has the average for its weights meanwhile; afterwards both are as they were, to the bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        """Piece by piece: a third buffer would be one more than training has room for."""
        for p, a in zip(self.params.split(SWAPPED), self.average.split(SWAPPED), strict=True):
            before = p.clone()
            p.copy_(a)
            a.copy_(before)
