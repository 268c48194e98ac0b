"""Configuration: frozen data, checked on construction. The one source of defaults, help texts and command-line flags.

The bare defaults are the default preset, a small llama-shaped model. Presets are TOML files beside this one; a preset's
table names the kind of model: [model] a transformer, [simplelm] the attention-free SimpleLM.
Tested by: tests/test_config.py."""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from tapeless.errors import INDIVISIBLE, OUT_OF_RANGE, UNKNOWN_KEY, WARMUP_TOO_LONG, WRONG_TYPE, ConfigError

LARGEST = 2**63  # of any whole number here
INFINITY = float("inf")
PRESETS = Path(__file__).parent / "presets"
WEIGHTS = ("raw", "ema")  # of a run: as they were trained, or their moving average
UNITS = {"s": 1, "m": 60, "h": 3600}  # of a time
REPORTERS = ("html", "csv", "tensorboard", "wandb", "trackio")  # what report_to may name: report/reporters.py


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
            raise INDIVISIBLE(
                name="num_heads",
                value=self.num_heads,
                by="num_kv_heads",
                divisor=self.num_kv_heads,
                fix="every key head serves the same number of query heads: change one of them",
            )
        if self.head_dim is None:
            if self.hidden_dim % self.num_heads:
                raise INDIVISIBLE(
                    name="hidden_dim",
                    value=self.hidden_dim,
                    by="num_heads",
                    divisor=self.num_heads,
                    fix="change one, or set head_dim",
                )
            object.__setattr__(self, "head_dim", self.hidden_dim // self.num_heads)
        require(self.head_dim >= 1, "head_dim", "at least 1", self.head_dim)
        if self.position == "rope" and self.head_dim % 2:
            raise ConfigError(f"rotary positions turn features in pairs, but head_dim is {self.head_dim}; make it even")
        if self.norm_bias and self.norm != "layer":
            raise ConfigError("norm_bias needs norm = 'layer': RMSNorm has no bias")
        require(0 < self.norm_eps < INFINITY, "norm_eps", "above 0", self.norm_eps)
        require(1 < self.rope_theta < INFINITY, "rope_theta", "above 1", self.rope_theta)
        require(0 <= self.dropout < 1, "dropout", "in [0, 1)", self.dropout)
        require(0 <= self.label_smoothing < 1, "label_smoothing", "in [0, 1)", self.label_smoothing)
        require(0 <= self.z_loss < INFINITY, "z_loss", "0 or more", self.z_loss)
        require(0 <= self.logit_softcap < INFINITY, "logit_softcap", "0 or more", self.logit_softcap)


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
        require(0 < self.norm_eps < INFINITY, "norm_eps", "above 0", self.norm_eps)


@dataclass(frozen=True)
class Lora:
    """Adapters of low rank beside matrices that stay as they are."""

    rank: int = option(8, "rank of the adapters [r]")
    alpha: float = option(16.0, "what they add is multiplied by alpha / r")
    targets: str = option("wq,wv", "the matrices that have one: names such as wq,wv, or all-linear")

    def __post_init__(self) -> None:
        check_types(self)
        require(self.rank >= 1, "lora_rank", "at least 1", self.rank)
        require(0 < self.alpha < INFINITY, "lora_alpha", "above 0", self.alpha)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained: data, optimizer, schedule, and what is written when."""

    dataset_path: str | None = option(
        None,
        "your text: a file, a directory, a glob, JSONL (of texts or of instructions), Parquet, a dataset of Hugging Face (its "
        "folder, or hf:owner/name); or tokens: a directory of `tapeless data prepare`, nanoGPT or llm.c",
    )
    val_path: str | None = option(None, "text to validate on, likewise; by default a tenth of the data is held out")
    text_field: str = option("text", "the field of JSONL or the column of a table that holds the text")
    corpus: str = option(
        "stdlib",
        "what to train on without a path: this Python's own sources, their English, or a source of known entropy",
        ("stdlib", "stdlib-docs", "markov", "arithmetic"),
    )
    tokenizer: str = option("bytes", "bytes, char, bpe (trained on the data to vocab_size), or the path of a tokenizer.json")
    init_from: str | None = option(None, "a run or a Hugging Face directory, whose model, weights and tokenizer to begin with")
    freeze: str = option(
        "", "parameters that stay as they are, by name with * in it and separated by commas: embed*,blocks.0.*"
    )
    lora_rank: int = option(0, "train adapters of this rank beside the frozen model of init_from; 0: train the model itself")
    lora_alpha: float | None = option(None, "what the adapters add is multiplied by alpha / rank; default twice the rank")
    lora_targets: str = option("wq,wv", "matrices that have an adapter, separated by commas, or all-linear")
    seq_len: int | None = option(None, "tokens in a training window [T]; default max_seq_len")
    document_attention: bool = option(False, "attention and loss stay inside a document where a window holds several")
    batch_size: int = option(8, "windows in a micro-batch [B]")
    grad_accum: int = option(1, "micro-batches in a step")
    epochs: int | None = option(None, "passes over the data; whichever of epochs and max_steps is reached first ends the run")
    max_steps: int | None = option(None, "steps; default 1000 where epochs is not given either")
    max_time: str = option("0", "save and stop, to be resumed, when a process has trained for so long: 90s, 10m, 2h; 0: never")
    optimizer: str = option("adamw", "which optimizer", ("adamw", "adam", "sgd", "muon"))
    lr: float = option(2e-3, "peak learning rate")
    min_lr: float | None = option(None, "where a falling schedule ends; default a tenth of lr")
    lr_schedule: str = option(
        "warmup-cosine",
        "shape of the learning rate over the run",
        ("warmup-cosine", "constant", "linear", "cosine", "wsd", "step", "polynomial", "restarts"),
    )
    warmup_steps: int | None = option(
        None, "steps in which the rate rises; default with warmup-cosine 5 % of the steps, at most 100, else 0"
    )
    weight_decay: float = option(0.1, "weight decay of the matrices")
    beta1: float = option(0.9, "decay of the first moment (adam, adamw; muon: of what is no hidden matrix)")
    beta2: float = option(0.95, "decay of the second moment (likewise)")
    eps: float = option(1e-8, "added to the root of the second moment (likewise)")
    momentum: float = option(0.9, "momentum (sgd, muon)")
    nesterov: bool | None = option(None, "Nesterov momentum; by default with muon, not with sgd")
    grad_clip: float = option(1.0, "largest global norm of the gradient; 0 lets every norm pass")
    spike_z: float = option(20.0, "skip the update of a loss this many robust deviations above the recent ones; 0: never")
    check_invariants_every: int = option(0, "steps between checks of the identities that every right gradient obeys; 0: none")
    ema_decay: float = option(0.0, "decay of a moving average of the weights, kept beside them; 0: none")
    seed: int = option(0, "seed of weights, data order, dropout and samples")
    device: str = option("cpu", "where to train, as torch names it: cpu, cuda, mps")
    dtype: str = option(
        "float32",
        "dtype of the computation; bfloat16 keeps float32 master weights, and so does fp8, whose blocks multiply in eight "
        "bits on GPUs that can; auto: bfloat16 where it multiplies a fifth faster here, else float32",
        ("auto", "float32", "bfloat16", "fp8", "float64"),
    )
    threads: int | None = option(None, "threads of the CPU, for torch and the kernels; default as many as torch takes")
    ops: str = option(
        "auto", "which ops: auto, reference (plain torch), cpu (Numba), triton, or a set of one's own by its name"
    )
    recompute: str = option(
        "none",
        "what backward computes again to save memory; cheap: norms, full: each block from its input",
        ("none", "cheap", "full"),
    )
    deterministic: bool = option(False, "the same bits every time from a GPU's libraries too, at a cost; a CPU always has them")
    out_dir: str | None = option(None, "the run's directory; default runs/ and a fresh name")
    eval_every: int = option(100, "steps between evaluations; 0: only at the end")
    eval_windows: int = option(64, "validation windows in an evaluation during the run, always the same ones; 0: all of them")
    patience: int = option(0, "stop after this many evaluations in a row without a new best; 0: never")
    save_every: int = option(200, "steps between checkpoints; the last step is always saved")
    keep_last: int = option(2, "newest checkpoints that stay; the best one always stays")
    keep_every: int = option(0, "checkpoints at multiples of this many steps stay too; 0: none")
    log_every: int = option(10, "steps between lines on the console; metrics.jsonl has every step")
    sample_every: int = option(500, "steps between samples; 0: only at the end")
    sample_tokens: int = option(100, "tokens in a sample")
    sample_prompt: str = option("", "what a sample continues; by default the first token of the validation part")
    sample_temperature: float = option(0.8, "temperature of samples; 0: always the likeliest token")
    layer_stats_every: int = option(50, "steps between looks at memory and at each layer's gradient and update; 0: none")
    report_to: str = option("html", "where the run is told too, by commas: html, csv, tensorboard, wandb, trackio; or none")
    verify: bool = option(True, "check the gradients on the first batch before the first step")

    @property
    def with_nesterov(self) -> bool:
        return self.optimizer == "muon" if self.nesterov is None else self.nesterov

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("batch_size", "grad_accum", "log_every", "save_every", "keep_last"):
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("seq_len", "epochs", "max_steps", "threads"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, "at least 1", value)
        counts = (
            "eval_every",
            "eval_windows",
            "patience",
            "keep_every",
            "sample_every",
            "sample_tokens",
            "layer_stats_every",
            "check_invariants_every",
        )
        for name in counts:
            require(getattr(self, name) >= 0, name, "0 or more", getattr(self, name))
        require(0 < self.lr < INFINITY, "lr", "a number above 0", self.lr)
        require(self.min_lr is None or 0 <= self.min_lr <= self.lr, "min_lr", f"between 0 and lr = {self.lr}", self.min_lr)
        require(self.warmup_steps is None or self.warmup_steps >= 0, "warmup_steps", "0 or more", self.warmup_steps)
        if self.warmup_steps is not None and self.max_steps is not None and self.warmup_steps > self.max_steps:
            raise WARMUP_TOO_LONG(warmup=self.warmup_steps, total=f"max_steps {self.max_steps}", most=self.max_steps)
        for name in ("weight_decay", "grad_clip", "spike_z", "sample_temperature"):
            require(0 <= getattr(self, name) < INFINITY, name, "0 or more", getattr(self, name))
        for name in ("beta1", "beta2", "momentum", "ema_decay"):
            require(0 <= getattr(self, name) < 1, name, "in [0, 1)", getattr(self, name))
        require(0 < self.eps < INFINITY, "eps", "above 0", self.eps)
        seconds(self.max_time)
        require(self.lora_rank >= 0, "lora_rank", "0 or more", self.lora_rank)
        require(self.lora_alpha is None or 0 < self.lora_alpha < INFINITY, "lora_alpha", "above 0", self.lora_alpha)
        if self.lora_rank and not self.init_from:
            raise ConfigError("lora_rank trains beside a model that is there already: name it with init_from")
        if self.lora_rank and self.freeze:
            raise ConfigError("lora_rank freezes everything but its adapters: leave out freeze")
        require(0 <= self.seed < 2**63, "seed", "0 or more", self.seed)
        for name in self.report_to.split(",") if self.report_to != "none" else ():
            if name == "none":
                raise ConfigError(f"report_to {self.report_to!r}: none stands alone; leave it or the others out")
            if name not in REPORTERS:
                raise ConfigError(f"report_to {name!r} is unknown; {nearest(name, (*REPORTERS, 'none'))}")
        require(not self.nesterov or self.momentum > 0, "momentum", "above 0 for nesterov", self.momentum)

    @property
    def lora(self) -> Lora | None:
        alpha = 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
        return Lora(self.lora_rank, alpha, self.lora_targets) if self.lora_rank else None


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. The defaults draw from the model's own distribution."""

    temperature: float = option(1.0, "below 1 sharpens the distribution, above 1 flattens it; 0: always the likeliest token")
    top_k: int = option(0, "draw from this many likeliest tokens; 0: from all")
    top_p: float = option(1.0, "draw from the likeliest tokens that together have this probability; 1: from all")
    min_p: float = option(0.0, "leave out tokens less than this times as probable as the likeliest; 0: none")
    repetition_penalty: float = option(1.0, "above 1 makes tokens that were seen before less likely; 1: as they are")
    seed: int = option(0, "equal seeds give equal samples")

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("temperature", "top_k"):
            require(0 <= getattr(self, name) < INFINITY, name, "0 or more", getattr(self, name))
        require(0 < self.top_p <= 1, "top_p", "above 0, at most 1", self.top_p)
        require(0 <= self.min_p <= 1, "min_p", "between 0 and 1", self.min_p)
        require(0 < self.repetition_penalty < INFINITY, "repetition_penalty", "above 0", self.repetition_penalty)
        require(0 <= self.seed < 2**63, "seed", "0 or more", self.seed)


AnyModelConfig = ModelConfig | SimpleLMConfig
KINDS: dict[str, type[ModelConfig] | type[SimpleLMConfig]] = {"model": ModelConfig, "simplelm": SimpleLMConfig}
TABLES: dict[str, Any] = {**KINDS, "train": TrainConfig}


def require(ok: bool, name: str, expected: str, got: Any) -> None:
    if not ok:
        raise OUT_OF_RANGE(name=name, expected=expected, got=got)


def seconds(time: str) -> float:
    """A time as flags and files spell it; 0 is no limit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", time)
    require(found is not None or time == "0", "max_time", "a number of s, m or h such as 90s, 10m or 2h, or 0", repr(time))
    return INFINITY if found is None else float(found[1]) * UNITS[found[2]]


def check_types(config: Any) -> None:
    """Every field holds the type it declares and one of its choices; whole numbers are welcome where a float is meant."""
    for f in fields(config):
        value = getattr(config, f.name)
        allowed = f.type.__args__ if hasattr(f.type, "__args__") else (f.type,)
        if f.metadata["derived"] and value is None:
            continue
        if float in allowed and type(value) is int and abs(value) < LARGEST:
            object.__setattr__(config, f.name, float(value))
        elif type(value) not in allowed:
            names = " or ".join("nothing" if t is type(None) else getattr(t, "__name__", str(t)) for t in allowed)
            raise WRONG_TYPE(name=f.name, expected=names, got=value)
        if type(value) is int and not abs(value) < LARGEST:
            raise OUT_OF_RANGE(name=f.name, expected="below 2^63", got=value)
        choices = f.metadata["choices"]
        if choices and value not in choices:
            raise ConfigError(f"{f.name} is {value!r}; {nearest(value, choices)}")


def nearest(word: str, valid: Iterable[str]) -> str:
    """The hint behind a wrong name: the nearest valid one, or all of them."""
    valid = list(valid)
    close = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else "expected one of " + ", ".join(valid)


def checked(table: str, values: Mapping[str, Any], where: str) -> Any:
    """The configuration of one table, its keys known and its values valid; `where` they stand goes into the error."""
    valid = [f.name for f in fields(TABLES[table])]
    for key in values:
        if key not in valid:
            raise UNKNOWN_KEY(key=f"{table}.{key}", nearest=nearest(key, valid)).at(where)
    try:
        return TABLES[table](**values)
    except ConfigError as error:
        raise error.at(where) from None


class Recipe(NamedTuple):
    """What a preset or a file sets, before flags: the kind of model, its fields, and those of its training."""

    kind: str  # model | simplelm
    model: dict[str, Any]
    train: dict[str, Any]


def read_recipe(path: Path) -> Recipe:
    """A TOML file with one of the tables [model] and [simplelm], and where it likes also [train]."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from None
    for name, values in tables.items():
        if name not in TABLES:
            raise ConfigError(f"{path}: unknown table [{name}]; {nearest(name, TABLES)}")
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {name} must be a table, [{name}]")
        checked(name, values, str(path))
    kinds = [name for name in tables if name in KINDS]
    if len(kinds) != 1:
        raise ConfigError(f"{path}: exactly one of the tables [model] and [simplelm] is needed, got {len(kinds)}")
    return Recipe(kinds[0], tables[kinds[0]], tables.get("train", {}))


def load_config(path: Path) -> AnyModelConfig:
    """The model that a TOML file describes."""
    recipe = read_recipe(path)
    return KINDS[recipe.kind](**recipe.model)


def preset_names() -> list[str]:
    return ["default", *sorted(path.stem for path in PRESETS.glob("*.toml"))]


def preset_recipe(name: str) -> Recipe:
    if name not in preset_names():
        raise ConfigError(f"unknown preset {name!r}; {nearest(name, preset_names())}")
    return Recipe("model", {}, {}) if name == "default" else read_recipe(PRESETS / f"{name}.toml")


def load_preset(name: str) -> AnyModelConfig:
    """The model of a preset."""
    recipe = preset_recipe(name)
    return KINDS[recipe.kind](**recipe.model)
