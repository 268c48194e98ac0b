"""Configuration: frozen data, checked on construction. The one source of defaults, help texts and command-line flags.

The bare defaults are the default preset, a small llama-shaped model. Presets are TOML files beside this one; a preset's
table names the kind of model: [model] a transformer, [simplelm] the attention-free SimpleLM."""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tapeless.errors import ConfigError

PRESETS = Path(__file__).parent / "presets"


def option(default: Any, help: str, choices: tuple[str, ...] = (), *, derived: bool = False) -> Any:
    """A field with its help text and, where they are few, its allowed values. derived: None is replaced on construction."""
    return field(default=default, metadata={"help": help, "choices": choices, "derived": derived})


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer. Letters in brackets: docs/notation.md."""

    vocab_size: int = option(256, "tokens in the vocabulary [V]")
    hidden_dim: int = option(128, "width of the residual stream [C]")
    num_layers: int = option(4, "blocks [L]")
    num_heads: int = option(4, "query heads [H]")
    num_kv_heads: int = option(None, "key and value heads [G]; divides num_heads; default num_heads", derived=True)
    head_dim: int = option(None, "width of a head [D]; default hidden_dim / num_heads", derived=True)
    intermediate_dim: int = option(344, "width of the feed-forward layer [F]")
    max_seq_len: int = option(128, "longest sequence the model is made for [T]")
    norm: str = option("rms", "which norm", ("rms", "layer"))
    norm_eps: float = option(1e-5, "added to the mean square inside every norm")
    norm_bias: bool = option(False, "LayerNorm with a bias")
    norm_placement: str = option("pre", "norm before a sublayer, or after its residual sum", ("pre", "post"))
    position: str = option("rope", "how positions are told apart", ("rope", "learned", "none"))
    rope_theta: float = option(1e4, "base of the rotary wavelengths")
    ffn: str = option(
        "swiglu", "feed-forward activation; the first two are gated", ("swiglu", "geglu", "gelu", "tanh", "relu", "relu2")
    )
    ffn_bias: bool = option(False, "biases in the feed-forward layer")
    attn_bias: bool = option(False, "biases in the attention projections")
    qk_norm: bool = option(False, "RMSNorm on each query and key head")
    tie_embeddings: bool = option(False, "the output product uses the embedding matrix")
    dropout: float = option(0.0, "probability that an element of the embedding or of a sublayer's output is dropped")
    z_loss: float = option(0.0, "weight of the squared log-sum-exp in the loss")
    label_smoothing: float = option(0.0, "share of the target spread evenly over the vocabulary")
    logit_softcap: float = option(0.0, "logits are bent by cap tanh(logits / cap); 0 leaves them straight")
    init: str = option("scaled-normal", "how weights begin", ("scaled-normal", "kaiming", "xavier"))

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("vocab_size", "hidden_dim", "num_layers", "num_heads", "intermediate_dim", "max_seq_len"):
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        require(self.num_kv_heads >= 1, "num_kv_heads", "at least 1", self.num_kv_heads)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads}: "
                "every key head serves the same number of query heads"
            )
        if self.head_dim is None:
            if self.hidden_dim % self.num_heads:
                raise ConfigError(
                    f"hidden_dim {self.hidden_dim} is not divisible by num_heads {self.num_heads}; change one, or set head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_dim // self.num_heads)
        require(self.head_dim >= 1, "head_dim", "at least 1", self.head_dim)
        if self.position == "rope" and self.head_dim % 2:
            raise ConfigError(f"rotary positions turn features in pairs, but head_dim is {self.head_dim}; make it even")
        if self.norm_bias and self.norm != "layer":
            raise ConfigError("norm_bias needs norm = 'layer': RMSNorm has no bias")
        require(self.norm_eps > 0, "norm_eps", "above 0", self.norm_eps)
        require(self.rope_theta > 1, "rope_theta", "above 1", self.rope_theta)
        require(0 <= self.dropout < 1, "dropout", "in [0, 1)", self.dropout)
        require(0 <= self.label_smoothing < 1, "label_smoothing", "in [0, 1)", self.label_smoothing)
        require(self.z_loss >= 0, "z_loss", "0 or more", self.z_loss)
        require(self.logit_softcap >= 0, "logit_softcap", "0 or more", self.logit_softcap)


@dataclass(frozen=True)
class SimpleLMConfig:
    """The attention-free model that validates a pipeline alone: embedding, LayerNorm, linear, GELU, linear."""

    vocab_size: int = option(256, "tokens in the vocabulary [V]")
    hidden_dim: int = option(64, "width of the embedding [C]")
    intermediate_dim: int = option(256, "width of the hidden layer [F]")
    norm_eps: float = option(1e-5, "added to the variance inside the norm")

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("vocab_size", "hidden_dim", "intermediate_dim"):
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        require(self.norm_eps > 0, "norm_eps", "above 0", self.norm_eps)


AnyModelConfig = ModelConfig | SimpleLMConfig
KINDS: dict[str, type[ModelConfig] | type[SimpleLMConfig]] = {"model": ModelConfig, "simplelm": SimpleLMConfig}


def require(ok: bool, name: str, expected: str, got: Any) -> None:
    if not ok:
        raise ConfigError(f"{name} must be {expected}, got {got}")


def check_types(config: Any) -> None:
    """Every field holds the type it declares and one of its choices; whole numbers are welcome where a float is meant."""
    for f in fields(config):
        value = getattr(config, f.name)
        allowed = f.type.__args__ if hasattr(f.type, "__args__") else (f.type,)
        if f.metadata["derived"] and value is None:
            continue
        if float in allowed and type(value) is int:
            object.__setattr__(config, f.name, float(value))
        elif type(value) not in allowed:
            names = " or ".join("nothing" if t is type(None) else getattr(t, "__name__", str(t)) for t in allowed)
            raise ConfigError(f"{f.name} must be {names}, got {value!r}")
        choices = f.metadata["choices"]
        if choices and value not in choices:
            raise ConfigError(f"{f.name} is {value!r}; {nearest(value, choices)}")


def nearest(word: str, valid: Iterable[str]) -> str:
    """The hint behind a wrong name: the nearest valid one, or all of them."""
    valid = list(valid)
    close = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else "expected one of " + ", ".join(valid)


def from_mapping(kind: str, values: Mapping[str, Any], where: str) -> AnyModelConfig:
    cls = KINDS[kind]
    valid = [f.name for f in fields(cls)]
    for key in values:
        if key not in valid:
            raise ConfigError(f"{where}: unknown key {kind}.{key}; {nearest(key, valid)}")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def load_config(path: Path) -> AnyModelConfig:
    """The model of a TOML file that has one table, [model] or [simplelm]."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from None
    for name in tables:
        if name not in KINDS:
            raise ConfigError(f"{path}: unknown table [{name}]; {nearest(name, KINDS)}")
    if len(tables) != 1:
        raise ConfigError(f"{path}: exactly one of the tables [model] and [simplelm] is needed, got {len(tables)}")
    ((kind, values),) = tables.items()
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: {kind} must be a table, [{kind}]")
    return from_mapping(kind, values, str(path))


def preset_names() -> list[str]:
    return ["default", *sorted(path.stem for path in PRESETS.glob("*.toml"))]


def load_preset(name: str) -> AnyModelConfig:
    if name not in preset_names():
        raise ConfigError(f"unknown preset {name!r}; {nearest(name, preset_names())}")
    return ModelConfig() if name == "default" else load_config(PRESETS / f"{name}.toml")
