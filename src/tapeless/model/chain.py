"""Chain: a sequence of ops with residual branches, and their backwards in reverse order, for small models of your own.

    chain = Chain(
        layer("embed", EMBED, w=(V, C)),
        residual(layer("norm", RMS_NORM, w=(C,), eps=1e-5), layer("mix", LINEAR, w=(C, C), b=None)),
        layer("head", LINEAR, w=(V, C), b=(V,)),
    )
    logits = chain.forward(tokens)
    chain.backward(dlogits)          # chain.grads["mix.w"], …

Tested by: tests/model/test_chain.py."""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.config import nearest
from tapeless.errors import ConfigError, OrderError
from tapeless.model.init import initialize
from tapeless.model.params import FlatLayout, Parametrized, ParamSpec, ParamStore
from tapeless.ops.embed import EMBED
from tapeless.ops.linear import LINEAR
from tapeless.ops.op import Op


class Layer(NamedTuple):
    """One op of one activation, the shapes of its parameters, and its settings."""

    name: str
    op: Op
    shapes: dict[str, tuple[int, ...] | None]  # None: the op goes without that parameter
    settings: dict[str, Any]

    def specs(self) -> list[ParamSpec]:
        matrix = "embedding" if self.op is EMBED else "linear"
        return [
            ParamSpec(
                name=f"{self.name}.{key}",
                shape=shape,
                init=matrix if len(shape) > 1 else "zeros" if key.startswith("b") else "ones",
                decay=len(shape) > 1,
                shard_axis=None,
                is_linear=self.op is LINEAR and len(shape) > 1,
            )
            for key, shape in self.shapes.items()
            if shape is not None
        ]

    def forward(self, x: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
        weights = {key: params.get(f"{self.name}.{key}") for key in self.shapes}
        return self.op.forward(x, **weights, **self.settings)

    def backward(self, dy: Tensor, saved: Any, params: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> Tensor | None:
        weights = {key: params.get(f"{self.name}.{key}") for key in self.shapes}
        dweights = {f"d{key}": grads.get(f"{self.name}.{key}") for key in self.shapes}
        wanted = inspect.signature(self.op.backward).parameters
        settings = {key: value for key, value in self.settings.items() if key in wanted}
        return self.op.backward(dy, saved, **weights, **dweights, **settings)


class Residual(NamedTuple):
    """y = x + branch(x), hence dx = dy + branch backward(dy)."""

    branch: tuple[Any, ...]

    def specs(self) -> list[ParamSpec]:
        return [spec for part in self.branch for spec in part.specs()]

    def forward(self, x: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
        if not (x.is_floating_point() or x.is_complex()):
            raise ConfigError(f"a residual branch adds to its input, which here is {x.dtype}; put an embedding before it")
        y, saved = _run(self.branch, x, params)
        return x + y, saved

    def backward(self, dy: Tensor, saved: Any, params: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> Tensor:
        dx = _run_back(self.branch, dy, saved, params, grads)
        return dy if dx is None else dy + dx


def layer(name: str, op: Op, **options: Any) -> Layer:
    """One op of a Chain. name: of its parameters, as in name.w. op: any Op. options: the op's own arguments by name. A
    parameter's shape is a tuple, and None leaves the parameter out; everything else is a setting of the op."""
    wanted = list(inspect.signature(op.forward).parameters.values())[1:]  # after the activation
    for key in options:
        if key not in [parameter.name for parameter in wanted]:
            raise ConfigError(f"layer {name!r}: unknown option {key}; {nearest(key, [p.name for p in wanted])}")
    for parameter in wanted:
        if parameter.default is parameter.empty and parameter.name not in options:
            raise ConfigError(f"layer {name!r}: {parameter.name} is missing; None leaves a parameter out")
    shapes = {key: value for key, value in options.items() if value is None or isinstance(value, tuple)}
    return Layer(name, op, shapes, {key: value for key, value in options.items() if key not in shapes})


def residual(*branch: Layer | Residual) -> Residual:
    """x + branch(x): the layers of the branch one after the other, and their result added to what they were given."""
    return Residual(branch)


def _run(parts: tuple[Any, ...], x: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, list[Any]]:
    saved = []
    for part in parts:
        x, part_saved = part.forward(x, params)
        saved.append(part_saved)
    return x, saved


def _run_back(
    parts: tuple[Any, ...], dy: Tensor, saved: list[Any], params: Mapping[str, Tensor], grads: Mapping[str, Tensor]
) -> Tensor | None:
    dx: Tensor | None = dy
    for part in reversed(parts):
        dx = part.backward(dx, saved.pop(), params, grads)
    return dx


class Chain(Parametrized):
    __doc__ = __doc__

    def __init__(
        self,
        *parts: Layer | Residual,
        seed: int = 0,
        device: str | torch.device = "cpu",
        dtype: str = "float32",
        init: str = "kaiming",
        initialized: bool = True,
    ):
        """parts: layers and residual branches, in the order of the forward. seed: of the initial weights. device, dtype: where
        and in what it computes. init: kaiming, xavier or scaled-normal. initialized: False leaves the parameters zero, for a
        caller who writes them all."""
        self.parts = parts
        specs = [spec for part in parts for spec in part.specs()]
        names = [spec.name for spec in specs]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two layers of the chain own a parameter {name!r}; give them different names")
        self.store = ParamStore(FlatLayout(specs), torch.device(device), dtype)
        self._compute = self.store.layout.views(self.store.compute_flat)
        if initialized:
            initialize(self.store, init, len(parts), seed)
        self._saved: tuple[list[Any], int] | None = None  # what forward kept, and the version of the parameters it saw

    def forward(self, x: Tensor, *, keep: bool = True) -> Tensor:
        """The output of the last part for x, the input of the first. keep: save what backward needs."""
        self.store.refresh()
        if keep:
            self._saved = None  # whatever goes wrong from here on, backward must not take an older forward for this one
        y, saved = _run(self.parts, x, self._compute)
        if keep:
            self._saved = saved, self.store.version
        return y

    def backward(self, dy: Tensor) -> Tensor | None:
        """Accumulate into `grads` and return the input's gradient, None where the input was integers."""
        if self._saved is None:
            raise OrderError("backward without a forward: call forward(x) before each")
        saved, version = self._saved
        self.store.expect_version(version)
        self._saved = None
        return _run_back(self.parts, dy, saved, self._compute, self.store.grads)
