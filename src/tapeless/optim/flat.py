"""What every optimizer here shares: the flat buffers behind the named views, and which stretches of them decay."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from tapeless.errors import ConfigError


def flat_buffer(views: Mapping[str, Tensor]) -> Tensor:
    """The one buffer that all views are cut from."""
    first = next(iter(views.values()))._base
    if first is None or any(view._base is not first for view in views.values()):
        raise ConfigError("an optimizer works on one flat buffer: pass model.params and model.grads")
    return first


def decayed_stretches(views: Mapping[str, Tensor], decay: Collection[str]) -> list[slice]:
    """Where in the flat buffer weight decay applies; neighbours that both decay are one stretch."""
    stretches: list[slice] = []
    follows = False
    for name, view in views.items():
        if name in decay:
            start, end = view.storage_offset(), view.storage_offset() + view.numel()
            if follows:
                stretches[-1] = slice(stretches[-1].start, end)  # a gap between the two is zero, and stays so
            else:
                stretches.append(slice(start, end))
        follows = name in decay
    return stretches


class FlatOptimizer(ABC):
    """Parameters, gradients and state as flat tensors. Subclasses say which state there is and how a step goes."""

    state_names: tuple[str, ...]

    def __init__(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], *, lr: float, decay: Collection[str] | None):
        self.params, self.grads = flat_buffer(params), flat_buffer(grads)
        matrices = {name for name, view in params.items() if view.dim() >= 2}
        self.decay = matrices if decay is None else set(decay)
        self.lr = lr
        self.t = 0  # steps taken
        self.state = {name: torch.zeros_like(self.params) for name in self.state_names}
        self._stretches = decayed_stretches(params, self.decay)
        self._views = params

    @abstractmethod
    def step(self) -> None:
        """Update the parameters by the gradients, with self.lr."""

    def named_state(self) -> dict[str, dict[str, Tensor]]:
        """The state under the parameters' names, as views: what a checkpoint writes, and writes back."""
        return {
            key: {name: flat[view.storage_offset() :][: view.numel()].view(view.shape) for name, view in self._views.items()}
            for key, flat in self.state.items()
        }
