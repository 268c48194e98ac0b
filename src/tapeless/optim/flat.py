"""What every optimizer shares: the flat buffers behind the named views, state, weight decay, construction from a TrainConfig.

The buffers have gaps between parameters (model/params.py). Gradients and state are zero there, so every update keeps the
gaps at zero, and a whole buffer can be updated at once.
Tested by: tests/optim/test_flat.py."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from functools import cached_property
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from tapeless.config import TrainConfig, nearest
from tapeless.config.fields import check_range
from tapeless.errors import ConfigError


def flat_buffer(views: Mapping[str, Tensor]) -> Tensor:
    """The one buffer that all views are slices of."""
    first = next(iter(views.values()))._base
    if first is None or any(view._base is not first for view in views.values()):
        raise ConfigError("an optimizer needs views of one flat buffer: pass model.params and model.grads")
    return first


def named_views(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of a flat buffer, with the names, offsets and shapes of `like`."""
    return {name: flat[view.storage_offset() :][: view.numel()].view(view.shape) for name, view in like.items()}


def _offsets(views: Mapping[str, Tensor]) -> dict[str, tuple[int, torch.Size]]:
    return {name: (int(view.storage_offset()), view.shape) for name, view in views.items()}


def decayed_spans(views: Mapping[str, Tensor], decay: Collection[str]) -> list[slice]:
    """Where in the flat buffer weight decay applies; neighbours that both decay share a span, gap included."""
    spans: list[slice] = []
    follows = False
    for name, view in views.items():
        if name in decay:  # mutant: decayed-spans
            start, end = view.storage_offset(), view.storage_offset() + view.numel()
            start = spans.pop().start if follows else start
            spans.append(slice(start, end))
        follows = name in decay  # mutant: decayed-neighbours
    return spans


def spans_without(views: Mapping[str, Tensor], numel: int, names: Collection[str]) -> list[slice]:
    """The flat buffer of `numel` elements without the named parameters, gaps included."""
    spans, end = [], 0
    for name, view in views.items():
        if name in names:
            start = int(view.storage_offset())
            spans.append(slice(end, start))
            end = start + view.numel()
    return [span for span in (*spans, slice(end, numel)) if span.start < span.stop]


class FlatOptimizer(ABC):
    """Parameters, gradients and state as flat tensors. Subclasses define the state and the update."""

    state_names: tuple[str, ...]
    options: tuple[str, ...] = ()  # fields of TrainConfig that it reads, besides lr and weight_decay; also its arguments
    kernel: str | None = None  # the field of OpSet that holds its fused update, passed as `fused`

    def __init__(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        *,
        lr: float,
        weight_decay: float,
        decay: Collection[str] | None,  # the parameters that decay, by name; None: all matrices, no norms and biases
    ):
        flat, self.grads = flat_buffer(params), flat_buffer(grads)
        trained = {name: params[name] for name in grads if name in params}  # the others are frozen and come last
        ends = max(view.storage_offset() + view.numel() for view in grads.values())
        if _offsets(trained) != _offsets(grads) or len(self.grads) != (ends if len(params) > len(grads) else len(flat)):
            raise ConfigError("params and grads are not of one model: their names, shapes or offsets differ")
        self.params = flat[: len(self.grads)]
        for name in set(decay or ()) - params.keys():
            raise ConfigError(f"decay names {name!r}, which is not a parameter; {nearest(name, params)}")
        check_range("lr", lr, ge=0)
        check_range("weight_decay", weight_decay, ge=0)
        self.decay = {name for name, view in trained.items() if (view.dim() >= 2 if decay is None else name in decay)}
        self.lr, self.weight_decay = lr, weight_decay
        self.t = 0  # steps taken
        self.state = {name: torch.zeros_like(self.params) for name in self.state_names}
        self._decayed_spans = decayed_spans(trained, self.decay) if weight_decay else []
        self._views = trained

    @classmethod
    def config_options(cls, config: TrainConfig) -> dict[str, Any]:
        """Its arguments from a configuration; None there means the default of the class."""
        values = {name: getattr(config, name) for name in ("lr", "weight_decay", *cls.options)}
        defaults = signature(cls).parameters
        return {name: defaults[name].default if value is None else value for name, value in values.items()}

    def step(
        self,
        lr: float | None = None,
        *,
        scale: float = 1.0,
        copy: Tensor | None = None,  # (n,)
    ) -> bool:
        """Update the parameters by `scale` times the gradients. lr: the learning rate from now on (`self.lr`); default the one
        given before. copy: receives the parameters in its own dtype; returned is whether it did. A scale other than 1 may be
        applied to the gradients in place."""
        if lr is not None:
            check_range("lr", lr, ge=0)
            self.lr = lr
        return self._step(scale, copy)

    def _step(self, scale: float, copy: Tensor | None) -> bool:
        if scale != 1:
            self.grads *= scale
        self._update()
        return False

    @abstractmethod
    def _update(self) -> None:
        """One step by the gradients as they are."""

    def _shrink(self, factor: float | Tensor) -> None:
        """Decoupled decay: p (1 - lr wd)."""
        for span in self._decayed_spans:
            self.params[span] *= factor

    def _coupled(
        self,
        g: Tensor,  # (n,)
    ) -> Tensor:  # (n,)
        """Coupled decay: g + wd p."""
        if not self._decayed_spans:
            return g
        d = g.clone()
        for span in self._decayed_spans:
            d[span].add_(self.params[span], alpha=self.weight_decay)
        return d

    def named_state(self) -> dict[str, dict[str, Tensor]]:
        """The state under the parameters' names, as views: what a checkpoint saves and restores."""
        return {key: named_views(flat, self._views) for key, flat in self.state.items()}


class CapturableOptimizer(FlatOptimizer):
    """One whose step reads every number that changes from step to step from a tensor, so that it can be captured."""

    one_kernel = False  # whether `update_on_device` is one pass over the buffers; otherwise `step` is faster on a CPU

    @abstractmethod
    def _step_scalars(self, t: int) -> list[float]:
        """What `_apply` reads at step t."""

    @abstractmethod
    def _identity_scalars(self) -> list[float]:
        """With these and zero gradients `_apply` changes nothing."""

    @abstractmethod
    def _apply(
        self,
        g: Tensor,  # (n,) gradients
        step_scalars: Tensor,  # (k,) on the device of the parameters
    ) -> None:
        """The formula of one step."""

    def step_scalars(self, t: int) -> Tensor:  # (k,)
        """What step t depends on besides the gradients, on the CPU; rounded here, from float64."""
        return torch.tensor(self._step_scalars(t), dtype=self.params.dtype)

    @cached_property
    def _identity(self) -> Tensor:  # (k,)
        return torch.tensor(self._identity_scalars(), dtype=self.params.dtype, device=self.params.device)

    def _update(self) -> None:
        self.t += 1
        self._apply(self.grads, self.step_scalars(self.t).to(self.params.device))

    def update_on_device(
        self,
        step_scalars: Tensor,  # (k,)
        scale: Tensor,  # () float32, of the gradients; NaN: nothing is updated
        copy: Tensor | None,  # (n,) receives the parameters
    ) -> None:
        """`step` with its numbers on the device, without reading a value: what a captured step calls. The caller counts t."""
        usable = scale == scale
        g = (self.grads * scale).masked_fill_(~usable, 0.0)
        self._apply(g, torch.where(usable, step_scalars, self._identity))
        if copy is not None:
            copy.copy_(self.params)
