"""What a sublayer is, and the registry of its kinds.

A model is a list of blocks, a block is residual wiring around sublayers (block.py), and one kind of sublayer is one class in
one file: attention.py, feed_forward.py, or a plugin. The class defines everything about its kind; memory, FLOPs, adapters,
decoding caches, gradient checks and reports are derived from it.

    specs()                   its parameters
    views(get)                the structure its passes read the parameters (or gradients) through; by default a dict by name
    forward(x, p, ctx)        x (B, T, C) -> y (B, T, C), saved
    backward(dy, saved, p, g, ctx) -> dx; accumulates the parameter gradients into g, whose entries are None where frozen
    drop_recomputable, recompute    what each recompute policy drops from `saved`, and how backward gets it again
    cache_shapes(B, capacity) what decoding remembers of earlier tokens; forward finds it in ctx.cache(self). If all of it
                              grows with the capacity, position by position, generation reuses equal prefixes
    extra_flops(T)            FLOPs of a token's forward beyond the matmuls with its linear weights, such as attention scores
    reference(x, params, documents)   optional: the formula in plain torch, which the gradient check differentiates by autograd
Neither pass may write into x, dy or saved: x and dy may be the residual stream and its gradient. dx and dw can be computed
separately: with ctx.deferred a list, `linear_backward` computes dx and appends the calls for dw.

Recompute policies
    none    keep everything the ops saved
    cheap   drop what can be recomputed without a matmul: norms, normed heads
    full    drop everything; the block runs forward again from its input
Recomputation runs the same ops on the same values, so gradients are equal bit for bit.
Tested by: tests/model/test_sublayer.py, tests/model/test_transformer_grads.py, tests/model/test_recompute.py."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from tapeless.config import ModelConfig, nearest
from tapeless.errors import ConfigError
from tapeless.model.cache import KVCache
from tapeless.model.linear import Adapter, LinearParams
from tapeless.model.params import FlatLayout, ParamSpec
from tapeless.ops.op import OpSet

RECOMPUTE = ("none", "cheap", "full")


class Dropout(NamedTuple):
    """Everything that determines a dropout mask, besides its place in the model."""

    p: float
    seed: int
    step: int
    first_sample: int  # global index of the batch's first row


class Context(NamedTuple):
    """What all sublayers of one pass through the model share."""

    ops: OpSet
    recompute: str  # none | cheap | full
    documents: Tensor | None = None  # (B, T) int64; attention stays within positions of equal value
    dropout: Dropout | None = None
    kv_cache: KVCache | None = None
    lora_scale: float = 1.0
    deferred: list[Callable[[], None]] | None = None  # with a list, linear_backward appends its dw computation here

    @property
    def offset(self) -> int:
        """How many tokens precede this pass."""
        return self.kv_cache.length if self.kv_cache else 0

    def cache(self, sublayer: "Sublayer") -> dict[str, Tensor] | None:
        """The sublayer's decoding cache by name, None outside decoding."""
        return self.kv_cache.of(sublayer.name) if self.kv_cache else None


class Views:
    """The parameters of one sublayer in a flat buffer, or their gradients."""

    def __init__(self, layout: FlatLayout, flat: Tensor, sublayer: "Sublayer"):
        self._layout, self._flat, self._prefix = layout, flat, f"{sublayer.name}."
        self._rows = {spec.name: spec.shape[0] for spec in sublayer.specs()}

    def __getitem__(self, name: str) -> Tensor | None:
        """None where the model does not have it, or it is frozen."""
        return self._layout.view(self._flat, self._prefix + name)

    def linear(self, weights: Sequence[str], biases: Sequence[str] = ()) -> LinearParams:
        """Adjacent matrices, and their biases, as one linear layer with their adapters."""
        adapters, first = [], 0
        for name in weights:
            a, b = self[f"{name}.lora_a"], self[f"{name}.lora_b"]
            if a is not None and b is not None:
                adapters.append(Adapter(a, b, first))
            first += self._rows.get(name, 0)
        w, b = (self._layout.joined(self._flat, *(self._prefix + name for name in names)) for names in (weights, biases))
        return LinearParams(w, b, tuple(adapters))


class Sublayer(ABC):
    kind: ClassVar[str]  # its name in ModelConfig.blocks and in parameter names
    overridable: ClassVar[tuple[str, ...]] = ()  # fields of ModelConfig that a layer may set: attn(num_heads=2)
    options: Mapping[str, Any] = {}  # settings of this kind alone, with their defaults

    def __init__(self, config: ModelConfig, name: str, settings: Mapping[str, Any]):
        """config: of the model. name: where it is in the model, such as blocks.3.attn. settings: of this layer."""
        floats = {key for key, value in self.options.items() if type(value) is float}
        settings = {k: float(v) if k in floats and type(v) is int else v for k, v in settings.items()}
        for key, value in settings.items():
            if key not in (valid := (*self.overridable, *self.options)):
                hint = nearest(key, valid) if valid else "it has no settings"
                raise ConfigError(f"blocks: {self.kind} has no setting {key!r}; {hint}")
            if key in self.options and type(value) is not type(self.options[key]):
                raise ConfigError(f"blocks: {self.kind}({key}={value}): expected {type(self.options[key]).__name__}")
        self.name, self.config = name, replace(config, **{k: v for k, v in settings.items() if k in self.overridable})
        self.options = {**self.options, **{k: v for k, v in settings.items() if k in self.options}}

    @abstractmethod
    def specs(self) -> list[ParamSpec]:
        """Names are relative to the sublayer; their order is that of the flat buffer."""

    def views(self, get: Views) -> Any:
        return {spec.name: get[spec.name] for spec in self.specs()}

    @abstractmethod
    def forward(self, x: Tensor, p: Any, ctx: Context) -> tuple[Tensor, Any]: ...

    @abstractmethod
    def backward(self, dy: Tensor, saved: Any, p: Any, g: Any, ctx: Context) -> Tensor: ...

    def drop_recomputable(self, saved: Any, policy: str) -> Any:
        return None if policy == "full" else saved

    def recompute(self, saved: Any, x: Tensor, p: Any, ctx: Context) -> Any:
        """`saved` as it was before drop_recomputable; x is the same input again. Under `full`, forward is called instead where
        the output is needed too."""
        return self.forward(x, p, ctx)[1] if saved is None else saved

    def cache_shapes(self, batch_size: int, capacity: int) -> dict[str, tuple[int, ...]]:
        return {}

    def extra_flops(self, seq_len: int) -> int:
        return 0


def matrices(parts: Mapping[str, int], columns: int) -> list[ParamSpec]:
    """The weights of one linear layer: adjacent matrices with these rows, sharded by rows."""
    return [ParamSpec(n, (rows, columns), "linear", True, 0, i > 0, True) for i, (n, rows) in enumerate(parts.items())]


def biases(parts: Mapping[str, int]) -> list[ParamSpec]:
    return [ParamSpec(name, (rows,), "zeros", False, 0, i > 0) for i, (name, rows) in enumerate(parts.items())]


def output_matrix(name: str, rows: int, columns: int, bias: str | None) -> list[ParamSpec]:
    """The linear layer that ends a sublayer, sharded by columns; its initial values shrink with depth."""
    specs = [ParamSpec(name, (rows, columns), "residual", True, 1, False, True)]
    return specs if bias is None else [*specs, ParamSpec(bias, (rows,), "zeros", False, None)]


_KINDS: dict[str, type[Sublayer]] = {}


def register_sublayer(cls: type[Sublayer]) -> type[Sublayer]:
    """Class decorator: makes the kind available to ModelConfig.blocks."""
    known = _KINDS.get(cls.kind)
    if known is not None and source_file(known) != source_file(cls):
        raise ConfigError(f"sublayer kind {cls.kind!r} is already registered by {known.__module__}; choose another name")
    if not cls.kind.isidentifier() or set(cls.overridable) & set(cls.options):
        raise ConfigError(f"sublayer kind {cls.kind!r}: the name must be an identifier, and no option a field of ModelConfig")
    _KINDS[cls.kind] = cls
    return cls


def source_file(definition: Any) -> Path | None:
    """None for what was defined in a notebook or a prompt."""
    try:
        file = Path(inspect.getsourcefile(definition) or "")
    except (TypeError, OSError):
        return None
    return file if file.is_file() else None


def sublayer_class(kind: str) -> type[Sublayer]:
    if kind not in _KINDS:
        raise ConfigError(
            f"unknown sublayer kind {kind!r} in blocks; {nearest(kind, _KINDS)}; "
            "a kind of your own must be imported first, or loaded with --plugin FILE"
        )
    return _KINDS[kind]
