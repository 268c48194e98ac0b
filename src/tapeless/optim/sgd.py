"""Stochastic gradient descent with momentum.

    d = g + wd p          for what decays, else d = g
    u = mu u + d          u = d at the first step
    p = p - lr u          with Nesterov: p - lr (d + mu u)
Tested by: tests/optim/test_sgd.py, step by step against torch.optim in float64."""

from collections.abc import Collection, Mapping

from torch import Tensor

from tapeless.config.fields import check_range
from tapeless.errors import ConfigError
from tapeless.optim.flat import CapturableOptimizer


class SGD(CapturableOptimizer):
    __doc__ = __doc__

    state_names = ("momentum",)
    options = ("momentum", "nesterov")

    def __init__(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        *,
        lr: float = 1e-2,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decay: Collection[str] | None = None,
    ):
        """params, grads: model.params and model.grads. lr: the learning rate, until step() gets another. momentum: mu above; 0:
        none. nesterov: look one step ahead along it. weight_decay: of the parameters that `decay` names; default all matrices,
        no norms and biases."""
        check_range("momentum", momentum, ge=0, lt=1)
        if nesterov and not momentum:
            raise ConfigError("nesterov needs a momentum above 0")
        super().__init__(params, grads, lr=lr, weight_decay=weight_decay, decay=decay)
        self.momentum, self.nesterov = momentum, nesterov

    def _step_scalars(self, t: int) -> list[float]:
        return [self.momentum, 1.0, -self.lr, -self.lr * self.momentum]

    def _identity_scalars(self) -> list[float]:
        return [1.0, 0.0, 0.0, 0.0]

    def _apply(self, g: Tensor, step_scalars: Tensor) -> None:
        momentum, one, rate, nesterov_rate = step_scalars
        d, u = self._coupled(g), self.state["momentum"]
        u.mul_(momentum).addcmul_(d, one)  # u starts at zero, so the first step gives u = d
        if self.nesterov:
            self.params.addcmul_(d, rate).addcmul_(u, nesterov_rate)
        else:
            self.params.addcmul_(u, rate)
