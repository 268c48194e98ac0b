"""Adam and AdamW.

    m = b1 m + (1 - b1) g         v = b2 v + (1 - b2) g^2
    p = p - lr (m / (1 - b1^t)) / ((v / (1 - b2^t))^(1/2) + eps)          t = 1 at the first step
Weight decay. Adam adds wd p to the gradient, so that the decay goes through the moments; AdamW shrinks the weights themselves
instead, p = p (1 - lr wd), before the step. Either way only what `decay` names: matrices, not norms and biases.
Tested by: tests/optim/test_adam.py, step by step against torch.optim in float64."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tapeless.errors import ConfigError
from tapeless.optim.flat import FlatOptimizer

PIECE = 2**14  # elements


class Adam(FlatOptimizer):
    state_names = ("exp_avg", "exp_avg_sq")

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
    ):
        if not eps > 0:
            raise ConfigError(f"eps must be above 0, got {eps}: where every gradient was 0 the step would be 0/0")
        super().__init__(params, grads, lr=lr, weight_decay=weight_decay, decay=decay)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps

    def _update(self) -> None:
        g = self._decay()
        self.t += 1
        self._move(g, slice(None))

    def _move(self, g: Tensor, where: slice) -> None:
        """The formula for a stretch of the flat buffers."""
        p, g, m, v = (x[where] for x in (self.params, g, self.state["exp_avg"], self.state["exp_avg_sq"]))
        m.lerp_(g, 1 - self.beta1)
        v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
        root = v.sqrt().div_(math.sqrt(1 - self.beta2**self.t)).add_(self.eps)
        p.addcdiv_(m, root, value=-self.lr / (1 - self.beta1**self.t))

    def _decay(self) -> Tensor:  # (n,) the gradients to go on with
        return self._coupled_grads()


class AdamW(Adam):
    def __init__(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        *,
        fused: Callable[..., None] | None = None,
        **options: Any,
    ):
        """fused: a kernel that does a whole step in one pass (OpSet.adam_update)."""
        super().__init__(params, grads, **options)
        self.fused = fused
        self._pieces = pieces(self._stretches, [slice(0, len(self.params))]).to(self.params.device)

    def step(self, *, scale: float = 1.0, copy: Tensor | None = None) -> bool:
        if self.fused is None:
            return super().step(scale=scale, copy=copy)
        self.t += 1
        device = self.params.device
        self.fused_update(self.numbers(self.t).to(device), torch.tensor(scale, dtype=torch.float32, device=device), copy)
        return copy is not None

    def numbers(self, t: int) -> Tensor:  # (7,) float32
        """What a fused step t is computed with, beside the gradients and their scale. 1 - beta is rounded here, from float64:
        of a beta that is rounded already, few digits would be left."""
        shrink, rate = 1 - self.lr * self.weight_decay, self.lr / (1 - self.beta1**t)
        correction = 1 / math.sqrt(1 - self.beta2**t)
        numbers = [shrink, rate, 1 - self.beta1, self.beta2, 1 - self.beta2, correction, self.eps]
        return torch.tensor(numbers, dtype=torch.float32)

    def fused_update(self, numbers: Tensor, scale: Tensor, copy: Tensor | None) -> None:
        """The pass itself. `numbers` (7,) and `scale` () lie on the device, and nothing here waits for it."""
        assert self.fused is not None
        moments = self.state["exp_avg"], self.state["exp_avg_sq"]
        self.fused(self.params, self.grads, *moments, copy, self._pieces, numbers, scale)

    def _decay(self) -> Tensor:
        self._shrink()
        return self.grads


def pieces(decayed: Sequence[slice], updated: Sequence[slice]) -> Tensor:  # (k, 3) int64: from, to, whether it decays
    """What is updated of the flat buffer, cut at the borders of what decays, and into parts that threads can share."""
    table = []
    for part in updated:
        end = part.start
        for stretch in [*decayed, slice(part.stop, part.stop)]:
            start, stop = (min(max(place, part.start), part.stop) for place in (stretch.start, stretch.stop))
            for first, last, decays in ((end, start, 0), (start, stop, 1)):
                table += [(i, min(i + PIECE, last), decays) for i in range(first, last, PIECE)]
            end = stop
    return torch.tensor(table, dtype=torch.int64).view(-1, 3)
