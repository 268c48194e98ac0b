"""Adam.

    m = b1 m + (1 - b1) g         v = b2 v + (1 - b2) g^2
    p = p - lr (m / (1 - b1^t)) / ((v / (1 - b2^t))^(1/2) + eps)          t = 1 at the first step
Weight decay is coupled: wd p is added to the gradient of the parameters that `decay` names, matrices by default.
Tested by: tests/optim/test_adam.py, step by step against torch.optim in float64."""

import math
from collections.abc import Collection, Mapping

from torch import Tensor

from tapeless.config.fields import check_range
from tapeless.errors import ConfigError
from tapeless.optim.flat import CapturableOptimizer


class Adam(CapturableOptimizer):
    __doc__ = __doc__

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
        """params, grads: model.params and model.grads. lr: the learning rate, until step() gets another. beta1, beta2: the
        decays of the two moments. eps: added to the root of the second. weight_decay: coupled, of the parameters that `decay`
        names; default all matrices, no norms and biases."""
        check_range("beta1", beta1, ge=0, lt=1)
        check_range("beta2", beta2, ge=0, lt=1)
        if not eps > 0:
            raise ConfigError(f"eps must be above 0, got {eps}: the step of a parameter without gradients would be 0/0")
        super().__init__(params, grads, lr=lr, weight_decay=weight_decay, decay=decay)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps

    def _step_scalars(self, t: int) -> list[float]:
        """The first seven are those of OpSet.adam_update. 1 - beta is computed here: from a rounded beta it would have few
        correct digits."""
        shrink, rate, root = 1 - self.lr * self.weight_decay, self.lr / (1 - self.beta1**t), math.sqrt(1 - self.beta2**t)
        return [shrink, rate, 1 - self.beta1, self.beta2, 1 - self.beta2, 1 / root, self.eps, root]

    def _identity_scalars(self) -> list[float]:
        return [1.0, 0.0, 0.0, 1.0, 0.0, 1.0, self.eps, 1.0]

    def _apply(self, g: Tensor, step_scalars: Tensor) -> None:
        self._move(self._coupled(g), slice(None), step_scalars)

    def _move(self, g: Tensor, where: slice, step_scalars: Tensor) -> None:
        """The formula for a span of the flat buffers."""
        _, rate, rest1, beta2, rest2, _, eps, root = step_scalars[:8]
        p, g, m, v = (x[where] for x in (self.params, g, self.state["exp_avg"], self.state["exp_avg_sq"]))
        m.lerp_(g, rest1)
        v.mul_(beta2).addcmul_(g * rest2, g)
        p.addcdiv_(m * -rate, v.sqrt().div_(root).add_(eps))
