"""The shape of a model: a decoder-only transformer, or SimpleLM; and LoRA adapters.

Tested by: tests/test_config.py."""

from dataclasses import dataclass

from tapeless.config.blocks import DEFAULT_BLOCKS, Pattern, parse_blocks
from tapeless.config.fields import INFINITY, check_fields, option, require
from tapeless.errors import INDIVISIBLE, ConfigError

MOST_LAYERS = 10_000  # what counts parameters or memory takes time for each


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer. Letters in brackets: docs/notation.md."""

    vocab_size: int = option(
        256,
        "tokens in the vocabulary [V]; if not given, that of a tokenizer.json or of prepared data, 4096 for a new BPE",
        ge=1,
        common=True,
    )
    hidden_dim: int = option(128, "width of the residual stream [C]", ge=1, common=True)
    num_layers: int = option(4, "number of blocks [L]", ge=1, lt=MOST_LAYERS, common=True)
    blocks: str = option(
        DEFAULT_BLOCKS,
        "sublayers of a block; / separates layers that differ, and the pattern repeats: attn+ffn/shift+ffn",
    )
    num_heads: int = option(4, "query heads [H]", ge=1, common=True)
    num_kv_heads: int = option(None, "key and value heads [G]; divides num_heads; default num_heads", derived=True, ge=1)
    head_dim: int = option(None, "width of a head [D]; default hidden_dim / num_heads", derived=True, ge=1)
    intermediate_dim: int = option(344, "width of the feed-forward layer [F]", ge=1)
    max_seq_len: int = option(128, "longest sequence [T]", ge=1, common=True)
    norm: str = option("rms", "kind of norm", ("rms", "layer"))
    norm_eps: float = option(1e-5, "added to the mean square inside every norm", gt=0, lt=1)
    norm_bias: bool = option(False, "LayerNorm with a bias")
    norm_placement: str = option("pre", "norm before each sublayer, or after its residual addition", ("pre", "post"))
    position: str = option("rope", "position encoding", ("rope", "learned", "none"))
    rope_theta: float = option(1e4, "base of the rotary frequencies", gt=1)
    ffn: str = option(
        "swiglu", "feed-forward activation; the first two are gated", ("swiglu", "geglu", "gelu", "tanh", "relu", "relu2")
    )
    ffn_bias: bool = option(False, "biases in the feed-forward layer")
    attn_bias: bool = option(False, "biases in the attention projections")
    qk_norm: bool = option(False, "RMSNorm on each query and key head")
    tie_embeddings: bool = option(False, "the output layer uses the embedding matrix")
    dropout: float = option(0.0, "dropout probability on the embedding and on the output of each sublayer", ge=0, lt=1)
    z_loss: float = option(0.0, "weight of the z-loss, the squared log-sum-exp of the logits", ge=0)
    label_smoothing: float = option(0.0, "share of the target distribution that is uniform over the vocabulary", ge=0, lt=1)
    logit_softcap: float = option(0.0, "logit soft-cap: cap tanh(logits / cap); 0: off", ge=0)
    init: str = option("scaled-normal", "weight initialisation", ("scaled-normal", "kaiming", "xavier"))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.num_heads % self.num_kv_heads:
            size, divisor = f"num_heads {self.num_heads}", f"num_kv_heads {self.num_kv_heads}"
            fix = "every key head serves the same number of query heads: change one of them"
            raise INDIVISIBLE(size=size, divisor=divisor, fix=fix)
        if self.head_dim is None:
            if self.hidden_dim % self.num_heads:
                size, divisor = f"hidden_dim {self.hidden_dim}", f"num_heads {self.num_heads}"
                raise INDIVISIBLE(size=size, divisor=divisor, fix="change one, or set head_dim")
            object.__setattr__(self, "head_dim", self.hidden_dim // self.num_heads)
        if self.position == "rope" and self.head_dim % 2:
            raise ConfigError(f"rotary positions turn features in pairs, but head_dim is {self.head_dim}; make it even")
        if self.norm_bias and self.norm != "layer":
            raise ConfigError("norm_bias needs norm = 'layer': RMSNorm has no bias")
        parse_blocks(self.blocks)

    @property
    def block_pattern(self) -> Pattern:
        """The sublayers of each layer of one period: layer i has those of i % period."""
        return parse_blocks(self.blocks)


@dataclass(frozen=True)
class SimpleLMConfig:
    """A model without attention, for testing a pipeline: embedding, LayerNorm, linear, GELU, linear."""

    vocab_size: int = option(256, "tokens in the vocabulary [V]", ge=1)
    hidden_dim: int = option(64, "width of the embedding [C]", ge=1)
    intermediate_dim: int = option(256, "width of the hidden layer [F]", ge=1)
    norm_eps: float = option(1e-5, "added to the variance inside the norm", gt=0, lt=1)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters of frozen matrices."""

    rank: int = option(8, "rank of the adapters [r]")
    alpha: float = option(16.0, "their output is scaled by alpha / r")
    targets: str = option("wq,wv", "matrices with an adapter: names such as wq,wv, or all-linear")

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.rank >= 1, "lora_rank", "at least 1", self.rank)
        require(0 < self.alpha < INFINITY, "lora_alpha", "above 0", self.alpha)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


AnyModelConfig = ModelConfig | SimpleLMConfig
