"""Llama: RMSNorm, rotary positions, a gated feed-forward. llama.cpp's architecture `llama` rotates neighbouring features of a
head instead of halves, so the rows of wq and wk are interleaved in GGUF."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tapeless.config import ModelConfig
from tapeless.errors import InputError
from tapeless.interop.family import COMMON, EXAMPLE, REQUIRED, Family, Row, Settings

ROTARY_TENSORS = (
    Row(("embed.w",), "model.embed_tokens.weight", "token_embd.weight"),
    Row(("blocks.{i}.attn_norm.w",), "model.layers.{i}.input_layernorm.weight", "blk.{i}.attn_norm.weight"),
    Row(("blocks.{i}.attn.{w}q",), "model.layers.{i}.self_attn.q_proj.{weight}", "blk.{i}.attn_q.{weight}"),
    Row(("blocks.{i}.attn.{w}k",), "model.layers.{i}.self_attn.k_proj.{weight}", "blk.{i}.attn_k.{weight}"),
    Row(("blocks.{i}.attn.{w}v",), "model.layers.{i}.self_attn.v_proj.{weight}", "blk.{i}.attn_v.{weight}"),
    Row(("blocks.{i}.attn.{w}o",), "model.layers.{i}.self_attn.o_proj.{weight}", "blk.{i}.attn_output.{weight}"),
    Row(("blocks.{i}.ffn_norm.w",), "model.layers.{i}.post_attention_layernorm.weight", "blk.{i}.ffn_norm.weight"),
    Row(("blocks.{i}.ffn.{w}_gate",), "model.layers.{i}.mlp.gate_proj.{weight}", "blk.{i}.ffn_gate.{weight}"),
    Row(("blocks.{i}.ffn.{w}_up",), "model.layers.{i}.mlp.up_proj.{weight}", "blk.{i}.ffn_up.{weight}"),
    Row(("blocks.{i}.ffn.{w}_down",), "model.layers.{i}.mlp.down_proj.{weight}", "blk.{i}.ffn_down.{weight}"),
    Row(("final_norm.w",), "model.norm.weight", "output_norm.weight"),
    Row(("head.w",), "lm_head.weight", "output.weight"),
)
INTERLEAVED = {"blocks.{i}.attn.{w}q": "num_heads", "blocks.{i}.attn.{w}k": "num_kv_heads"}


class Llama(Family):
    name = "LlamaForCausalLM"
    model_type = gguf_architecture = "llama"
    fixed: ClassVar = {**COMMON, "norm": "rms", "position": "rope", "qk_norm": False}
    activation_key = "hidden_act"
    activations: ClassVar = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}
    keys: ClassVar[Mapping[str, tuple[str, Any]]] = {
        "vocab_size": ("vocab_size", REQUIRED),
        "hidden_size": ("hidden_dim", REQUIRED),
        "num_hidden_layers": ("num_layers", REQUIRED),
        "num_attention_heads": ("num_heads", REQUIRED),
        "num_key_value_heads": ("num_kv_heads", None),
        "head_dim": ("head_dim", None),
        "intermediate_size": ("intermediate_dim", REQUIRED),
        "max_position_embeddings": ("max_seq_len", 2048),
        "rms_norm_eps": ("norm_eps", 1e-6),
        "attention_bias": ("attn_bias", False),
        "mlp_bias": ("ffn_bias", False),
        "tie_word_embeddings": ("tie_embeddings", False),
    }
    tensors = tuple(row._replace(interleaved=INTERLEAVED.get(row.params[0])) for row in ROTARY_TENSORS)
    base_model_prefix = "model"
    ignored = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
    gguf_fixed: ClassVar = {"ffn": "swiglu"}
    gguf_keys: ClassVar = {
        "attention.layer_norm_rms_epsilon": "norm_eps",
        "rope.dimension_count": "head_dim",
        "rope.freq_base": "rope_theta",
    }
    examples: ClassVar[tuple[ModelConfig, ...]] = (
        ModelConfig(hidden_dim=24, num_kv_heads=2, norm_eps=1e-4, **EXAMPLE),
        ModelConfig(hidden_dim=24, attn_bias=True, ffn_bias=True, tie_embeddings=True, **EXAMPLE),
    )

    def settings(self, config: ModelConfig) -> dict[str, Any]:
        """The rotary base as transformers 5 and as transformers 4 spells it."""
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}
        return {**super().settings(config), "rope_parameters": rope, "rope_theta": config.rope_theta}

    def read_special(self, settings: Settings, values: Settings, where: str) -> tuple[dict[str, Any], list[str]]:
        kinds, dropout = settings.get("layer_types"), settings.get("attention_dropout")
        if kinds is not None and not (isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)):
            raise InputError(f"{where}: layer_types is {kinds!r:.120}; only full_attention is supported")
        notes = [f"attention_dropout {dropout} matters in training only and is not imported"] if dropout else []
        return {"rope_theta": read_rope_theta(settings, where)}, notes


def read_rope_theta(settings: Settings, where: str) -> Any:
    """From rope_parameters (transformers 5) or the top level (4). Any scaling of the wavelengths is refused."""
    found = {}
    for key in ("rope_parameters", "rope_scaling"):
        table = settings.get(key)
        if table is None:
            continue
        if not isinstance(table, dict):
            raise InputError(f"{where}: {key} must be a table, got {table!r:.80}")
        kind = table.get("rope_type", table.get("type", "default"))
        if kind != "default" or table.get("partial_rotary_factor", 1) != 1:
            raise InputError(f"{where}: {key} is {table!r:.200}; only rope_type 'default' is supported")
        if "rope_theta" in table:
            found[key] = table["rope_theta"]
    if settings.get("rope_theta") is not None:
        found["rope_theta"] = settings["rope_theta"]
    values = list(found.values()) or [1e4]
    if any(value != values[0] for value in values):
        raise InputError(f"{where}: rope_theta is given twice with different values: {found}")
    return values[0]


FAMILY = Llama()
