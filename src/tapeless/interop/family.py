"""What a Hugging Face family defines, and what is derived from it: config.json, safetensors and GGUF, in both directions.

A family is one file in families/: a subclass of Family whose attributes are tables. A model that the family cannot express is
refused with the reason; a config.json that asks for something our models do not compute is refused by the key that asks.
Settings that matter in training only (dropout in a Llama, z-loss) do not change the function, so they give a note instead.
Tested by: tests/interop/test_families.py, tests/interop/test_family.py, tests/model/test_against_hf.py."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tapeless.config import DEFAULT_BLOCKS, ModelConfig, checked
from tapeless.errors import ConfigError, InputError
from tapeless.model.params import ParamSpec
from tapeless.model.transformer import transformer_specs

Settings = Mapping[str, Any]  # of a config.json by key, or of a ModelConfig by field
REQUIRED = object()  # a config.json key without a default
SAME_ACTIVATION = {"swish": "silu", "gelu_pytorch_tanh": "gelu_new", "gelu_new": "gelu_pytorch_tanh"}  # alternative names
MAX_LISTED = 5  # tensors listed in an error

# Fields of ModelConfig on which all families agree, to be included in their `fixed`.
COMMON: dict[str, Any] = {"blocks": DEFAULT_BLOCKS, "norm_placement": "pre", "logit_softcap": 0.0}
# GGUF metadata (without the architecture's prefix) that every architecture has -> field of ModelConfig.
GGUF_COMMON = {
    "context_length": "max_seq_len",
    "embedding_length": "hidden_dim",
    "block_count": "num_layers",
    "feed_forward_length": "intermediate_dim",
    "attention.head_count": "num_heads",
    "attention.head_count_kv": "num_kv_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
}
# The sizes of small models for `examples`.
EXAMPLE: dict[str, Any] = {"vocab_size": 23, "num_layers": 2, "num_heads": 4, "max_seq_len": 9, "intermediate_dim": 13}
# config.json keys that no family supports.
UNSUPPORTED = {
    "auto_map": "asks to run code from the model's directory",
    "quantization_config": "means that the weights are quantized; save them as float32, float16 or bfloat16",
}


class Row(NamedTuple):
    """One tensor of theirs. {i} is the layer; a row with {w} is both the weight and the bias ({weight} in their names).
    Rows whose parameters a model does not have (biases, an untied head) are skipped."""

    params: tuple[str, ...]  # ours; several are stacked along the first axis
    hf: str
    gguf: str
    transposed: bool = False  # a matrix is stored (in, out) in the Hugging Face file
    interleaved: str | None = None  # GGUF stores RoPE pairs as neighbours; the field of ModelConfig with the number of heads

    def filled(self, **values: object) -> "Row":
        params = tuple(name.format(**values) for name in self.params)
        return self._replace(params=params, hf=self.hf.format(**values), gguf=self.gguf.format(**values))


class Family:
    name: ClassVar[str]  # the class in transformers, also the entry of `architectures`
    model_type: ClassVar[str]  # in config.json
    gguf_architecture: ClassVar[str]
    fixed: ClassVar[Mapping[str, Any]]  # fields of ModelConfig that must have this value
    divisible: ClassVar[bool] = True  # whether hidden_dim must be divisible by num_heads
    always_on: ClassVar[tuple[str, ...]] = ()  # biases that their class always has; a model without them is exported with zeros
    activation_key: ClassVar[str]
    activations: ClassVar[Mapping[str, str]]  # our ffn -> their name; the first is the default of their class
    keys: ClassVar[Mapping[str, tuple[str, Any]]]  # config.json key -> field of ModelConfig, and the default of their class
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # keys of features we do not have -> values that turn them off
    training_only: ClassVar[tuple[str, ...]] = ("z_loss", "label_smoothing", "dropout")  # fields without a config.json key
    tensors: ClassVar[tuple[Row, ...]]
    base_model_prefix: ClassVar[str]  # of all tensors but the head; files saved from the base model omit it
    ignored: ClassVar[str] = "(?!)"  # regular expression of constants that old files store among the weights
    gguf_fixed: ClassVar[Mapping[str, Any]]  # as `fixed`, what llama.cpp requires in addition
    gguf_keys: ClassVar[Mapping[str, str]]  # as GGUF_COMMON, what this architecture has in addition
    examples: ClassVar[tuple[ModelConfig, ...]]  # small models that gradcheck compares with transformers

    # Which models it expresses.

    def misfits(self, config: ModelConfig) -> list[str]:
        """Why this family cannot express a model; empty if it can."""
        found = _differences(self.fixed, config)
        if config.ffn not in self.activations:
            found.append(f"ffn must be {' or '.join(map(repr, self.activations))}, got {config.ffn!r}")
        if self.divisible and config.hidden_dim % config.num_heads:
            found.append(f"hidden_dim {config.hidden_dim} must be divisible by num_heads {config.num_heads}")
        return found

    def gguf_misfits(self, config: ModelConfig) -> list[str]:
        """Why llama.cpp's architecture cannot express a model that the Hugging Face class can."""
        return _differences(self.gguf_fixed, config)

    def completed(self, config: ModelConfig) -> ModelConfig:
        """The model with the biases that their class always has."""
        choices: dict[str, Any] = dict.fromkeys(self.always_on, True)
        return replace(config, **choices)

    def training_notes(self, config: ModelConfig) -> list[str]:
        values = {field: getattr(config, field) for field in self.training_only}
        return [f"{field} = {value} matters in training only and is not exported" for field, value in values.items() if value]

    # config.json

    def settings(self, config: ModelConfig) -> dict[str, Any]:
        """What config.json says about the function."""
        settings = {key: getattr(config, field) for key, (field, _) in self.keys.items()}
        settings |= {key: values[0] for key, values in self.neutral.items()}
        return {**settings, self.activation_key: self.activations[config.ffn]}

    def read_settings(self, settings: Settings, where: str) -> tuple[ModelConfig, list[str]]:
        """The model that a config.json describes, and notes; an error if it asks for anything that our models are not."""
        values: dict[str, Any] = {}
        for key, reason in UNSUPPORTED.items():
            if settings.get(key) is not None:
                raise InputError(f"{where}: {key} {reason}")
        for key, (field, default) in self.keys.items():
            value = settings.get(key, default)
            if default is REQUIRED and value in (REQUIRED, None):
                raise InputError(f"{where}: {key} is missing")
            if value is not None:
                values[field] = value
        for key, allowed in self.neutral.items():
            if key in settings and settings[key] not in allowed:
                raise InputError(f"{where}: {key} is {settings[key]!r}; only {allowed[0]!r} is supported")
        values |= {**self.fixed, **dict.fromkeys(self.always_on, True), "ffn": self._read_activation(settings, where)}
        more, notes = self.read_special(settings, values, where)
        config = checked("model", {**values, **more}, where)
        found = self.misfits(config)
        if found:
            raise InputError(f"{where}: not a valid {self.name}: {'; '.join(found)}")
        return config, notes

    def read_special(self, settings: Settings, values: Settings, where: str) -> tuple[dict[str, Any], list[str]]:
        """Fields of ModelConfig that `keys` cannot express, and notes. values: the fields read so far, not yet validated."""
        return {}, []

    def _read_activation(self, settings: Settings, where: str) -> str:
        ours = {theirs: ffn for ffn, theirs in self.activations.items()}
        theirs = settings.get(self.activation_key, next(iter(ours)))
        if isinstance(theirs, str):
            for name in (theirs, SAME_ACTIVATION.get(theirs)):
                if name in ours:
                    return ours[name]
        raise InputError(f"{where}: {self.activation_key} is {theirs!r:.80}; expected one of {', '.join(ours)}")

    # Tensors

    @property
    def head(self) -> str:
        """Their name of the head: in a tied model either absent or a copy of the embedding."""
        return next(row.hf for row in self.tensors if row.params == ("head.w",))

    def rows(self, config: ModelConfig) -> tuple[dict[str, ParamSpec], list[Row]]:
        """The model's parameters, and the rows of all layers that hold them. Every parameter must have a row."""
        specs, rows = param_specs(config), {}
        for row in self.tensors:
            for weight in ("weight", "bias"):
                for i in range(config.num_layers):
                    filled = row.filled(i=i, weight=weight, w=weight[0])
                    if filled.params[0] in specs:
                        rows[filled.hf] = filled
        uncovered = specs.keys() - {name for row in rows.values() for name in row.params}
        if uncovered:
            raise ConfigError(f"{self.name} has no tensor for the parameter {min(uncovered)}")
        return specs, list(rows.values())

    def to_hf(self, config: ModelConfig, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our parameters or gradients under their names and in their layout; a tied head is omitted."""
        result = {}
        for row in self.rows(config)[1]:
            stacked = torch.cat([params[name] for name in row.params])
            result[row.hf] = stacked.t().contiguous() if row.transposed else stacked
        return result

    def from_hf(self, config: ModelConfig, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Their tensors under our names and in our layout. read: returns a tensor by its name, called once for each."""
        specs, rows = self.rows(config)
        result = {}
        for row in rows:
            stacked = read(row.hf)
            parts = (stacked.t() if row.transposed else stacked).split([specs[name].shape[0] for name in row.params])
            result.update({name: part.contiguous() for name, part in zip(row.params, parts, strict=True)})
        return result

    def to_gguf(self, config: ModelConfig, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        result = {}
        for row in self.rows(config)[1]:
            stacked = torch.cat([params[name] for name in row.params])
            result[row.gguf] = interleave(stacked, getattr(config, row.interleaved)) if row.interleaved else stacked
        return result

    def shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """The shape of each of their tensors."""
        specs, rows = self.rows(config)
        shapes = {}
        for row in rows:
            parts = [specs[name].shape for name in row.params]
            shape = (sum(part[0] for part in parts), *parts[0][1:])
            shapes[row.hf] = shape[::-1] if row.transposed else shape
        return shapes

    def check_shapes(self, config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> None:
        """Every tensor is present, with its shape, and there is no other: checked before any value is read."""
        expected = self.shapes(config)
        optional = {self.head} if config.tie_embeddings else set()
        wrong = [f"{name} {shape} is missing" for name, shape in expected.items() if name not in found]
        wrong += [f"{n} is {found[n]}, expected {s}" for n, s in expected.items() if n in found and found[n] != s]
        wrong += [f"{n!r:.120} {s} is unexpected" for n, s in found.items() if n not in expected.keys() | optional]
        if wrong:
            more = f"; and {len(wrong) - MAX_LISTED} more" if len(wrong) > MAX_LISTED else ""
            raise InputError(f"the tensors do not match config.json ({self.name}): {'; '.join(wrong[:MAX_LISTED])}{more}")

    def full_names(self, names: Mapping[str, object]) -> dict[str, str]:
        """Name in `tensors` -> name in the file, which may have been saved without the head and hence without the prefix."""
        prefix = f"{self.base_model_prefix}."
        bare = self.head not in names and not any(name.startswith(prefix) for name in names)
        return {f"{prefix}{name}" if bare else name: name for name in names}


def param_specs(config: ModelConfig) -> dict[str, ParamSpec]:
    return {spec.name: spec for spec in transformer_specs(config)}


def interleave(w: Tensor, num_heads: int) -> Tensor:  # (H*D, ...) both
    """Rows of each head from halves (0 … D/2-1, D/2 … D-1) to pairs (0, D/2, 1, D/2+1, …)."""
    return w.reshape(num_heads, 2, -1, *w.shape[1:]).transpose(1, 2).reshape(w.shape).contiguous()


def _differences(fixed: Mapping[str, Any], config: ModelConfig) -> list[str]:
    found = {field: getattr(config, field) for field in fixed}
    return [f"{field} must be {value!r}, got {found[field]!r}" for field, value in fixed.items() if found[field] != value]
