"""AdamW: Adam with decoupled weight decay.

    p = p (1 - lr wd)       for what `decay` names, before the step of Adam, whose gradients the decay does not enter
The OpSet may have the whole step as one kernel (adam_update).
Tested by: tests/optim/test_adam.py, step by step against torch.optim in float64; tests/kernels/cpu/test_update.py."""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from tapeless.optim.adam import Adam

PIECE = 2**14  # elements


class AdamW(Adam):
    __doc__ = __doc__

    kernel = "adam_update"

    def __init__(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        *,
        lr: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        decay: Collection[str] | None = None,
        fused: Callable[..., None] | None = None,
    ):
        """As Adam, but weight_decay is decoupled. fused: a kernel that does a whole step in one pass: model.ops.adam_update,
        which a set of ops may have; default plain torch."""
        super().__init__(params, grads, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, decay=decay)
        self.fused, self.one_kernel = fused, fused is not None
        self._pieces = pieces(self._decayed_spans, [slice(0, len(self.params))]).to(self.params.device)

    def _step(self, scale: float, copy: Tensor | None) -> bool:
        if self.fused is None:
            return super()._step(scale, copy)
        self.t += 1
        device = self.params.device
        self.update_on_device(
            self.step_scalars(self.t).to(device), torch.tensor(scale, dtype=torch.float32, device=device), copy
        )
        return copy is not None

    def update_on_device(self, step_scalars: Tensor, scale: Tensor, copy: Tensor | None) -> None:
        if self.fused is None:
            super().update_on_device(step_scalars, scale, copy)
        else:
            self._fused_update(self.grads, step_scalars, scale, copy)

    def _fused_update(self, g: Tensor, step_scalars: Tensor, scale: Tensor, copy: Tensor | None) -> None:
        assert self.fused is not None
        moments = self.state["exp_avg"], self.state["exp_avg_sq"]
        self.fused(self.params, g, *moments, copy, self._pieces, step_scalars[:7], scale)

    def _apply(self, g: Tensor, step_scalars: Tensor) -> None:
        self._shrink(step_scalars[0])
        self._move(g, slice(None), step_scalars)


def pieces(decayed: Sequence[slice], updated: Sequence[slice]) -> Tensor:  # (k, 3) int64: start, end, whether it decays
    """What is updated of the flat buffer, cut where weight decay starts and ends, and into parts that threads share."""
    table = []
    for part in updated:
        end = part.start
        for span in [*decayed, slice(part.stop, part.stop)]:
            start, stop = (min(max(place, part.start), part.stop) for place in (span.start, span.stop))
            for first, last, decays in ((end, start, 0), (start, stop, 1)):
                table += [(i, min(i + PIECE, last), decays) for i in range(first, last, PIECE)]
            end = stop
    return torch.tensor(table, dtype=torch.int64).view(-1, 3)
