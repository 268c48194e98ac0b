"""Adam.

    m = b1 m + (1 - b1) g         v = b2 v + (1 - b2) g^2
    p = p - lr (m / (1 - b1^t)) / ((v / (1 - b2^t))^(1/2) + eps)          t = 1 at the first step
Weight decay is coupled: wd p is added to the gradient of the parameters that `decay` names, matrices by default.
Tested by: tests/optim/test_adam.py, step by step against torch.optim in float64."""

import math
from collections.abc import Collection, Mapping

from torch import Tensor

from tapeless.errors import ConfigError
from tapeless.optim.flat import FlatOptimizer


class Adam(FlatOptimizer):
    state_names = ("exp_avg", "exp_avg_sq")
    options: tuple[str, ...] = ("beta1", "beta2", "eps")

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
            raise ConfigError(f"eps must be above 0, got {eps}: the step of a parameter without gradients would be 0/0")
        super().__init__(params, grads, lr=lr, weight_decay=weight_decay, decay=decay)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps

    def _update(self) -> None:
        g = self._decay()
        self.t += 1
        self._move(g, slice(None))

    def _move(self, g: Tensor, where: slice) -> None:
        """The formula for a span of the flat buffers."""
        p, g, m, v = (x[where] for x in (self.params, g, self.state["exp_avg"], self.state["exp_avg_sq"]))
        m.lerp_(g, 1 - self.beta1)
        v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
        root = v.sqrt().div_(math.sqrt(1 - self.beta2**self.t)).add_(self.eps)
        p.addcdiv_(m, root, value=-self.lr / (1 - self.beta1**self.t))

    def _decay(self) -> Tensor:  # (n,) the gradients for the moments
        return self._coupled_grads()
