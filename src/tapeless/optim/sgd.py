"""Stochastic gradient descent with momentum.

    d = g + wd p          for what decays, else d = g
    u = mu u + d          u = d at the first step
    p = p - lr u          with Nesterov: p - lr (d + mu u)
Tested by: tests/optim/test_sgd.py, step by step against torch.optim in float64."""

from collections.abc import Collection, Mapping

from torch import Tensor

from tapeless.errors import ConfigError
from tapeless.optim.flat import FlatOptimizer


class SGD(FlatOptimizer):
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
        if nesterov and not momentum:
            raise ConfigError("nesterov needs a momentum above 0")
        super().__init__(params, grads, lr=lr, weight_decay=weight_decay, decay=decay)
        self.momentum, self.nesterov = momentum, nesterov

    def _update(self) -> None:
        d, u = self._coupled_grads(), self.state["momentum"]
        self.t += 1
        u.mul_(self.momentum).add_(d)  # u starts at zero, so the first step gives u = d
        if self.nesterov:
            self.params.add_(d, alpha=-self.lr).add_(u, alpha=-self.lr * self.momentum)
        else:
            self.params.add_(u, alpha=-self.lr)
