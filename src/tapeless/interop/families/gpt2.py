"""GPT-2: LayerNorm, learned positions, a plain activation, biases everywhere. q, k and v are one tensor; its safetensors store
matrices (in, out), the transpose of ours."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from tapeless.config import ModelConfig
from tapeless.interop.family import COMMON, EXAMPLE, REQUIRED, Family, Row, Settings

Conv1D = partial(Row, transposed=True)  # their linear layer: (in, out)
QKV = ("blocks.{i}.attn.{w}q", "blocks.{i}.attn.{w}k", "blocks.{i}.attn.{w}v")
BIASES: dict[str, Any] = {"norm_bias": True, "attn_bias": True, "ffn_bias": True}


class GPT2(Family):
    name = "GPT2LMHeadModel"
    model_type = gguf_architecture = "gpt2"
    fixed: ClassVar = {**COMMON, "norm": "layer", "position": "learned", "qk_norm": False}
    always_on = tuple(BIASES)
    activation_key = "activation_function"
    activations: ClassVar = {"gelu": "gelu_new", "tanh": "tanh", "relu": "relu", "relu2": "relu2"}
    keys: ClassVar[Mapping[str, tuple[str, Any]]] = {
        "vocab_size": ("vocab_size", REQUIRED),
        "n_embd": ("hidden_dim", REQUIRED),
        "n_layer": ("num_layers", REQUIRED),
        "n_head": ("num_heads", REQUIRED),
        "n_inner": ("intermediate_dim", None),
        "n_positions": ("max_seq_len", REQUIRED),
        "layer_norm_epsilon": ("norm_eps", 1e-5),
        "tie_word_embeddings": ("tie_embeddings", True),
    }
    neutral: ClassVar = {
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    }
    training_only = ("z_loss", "label_smoothing")
    tensors = (
        Row(("embed.w",), "transformer.wte.weight", "token_embd.weight"),
        Row(("pos.w",), "transformer.wpe.weight", "position_embd.weight"),
        Row(("blocks.{i}.attn_norm.{w}",), "transformer.h.{i}.ln_1.{weight}", "blk.{i}.attn_norm.{weight}"),
        Conv1D(QKV, "transformer.h.{i}.attn.c_attn.{weight}", "blk.{i}.attn_qkv.{weight}"),
        Conv1D(("blocks.{i}.attn.{w}o",), "transformer.h.{i}.attn.c_proj.{weight}", "blk.{i}.attn_output.{weight}"),
        Row(("blocks.{i}.ffn_norm.{w}",), "transformer.h.{i}.ln_2.{weight}", "blk.{i}.ffn_norm.{weight}"),
        Conv1D(("blocks.{i}.ffn.{w}_up",), "transformer.h.{i}.mlp.c_fc.{weight}", "blk.{i}.ffn_up.{weight}"),
        Conv1D(("blocks.{i}.ffn.{w}_down",), "transformer.h.{i}.mlp.c_proj.{weight}", "blk.{i}.ffn_down.{weight}"),
        Row(("final_norm.{w}",), "transformer.ln_f.{weight}", "output_norm.{weight}"),
        Row(("head.w",), "lm_head.weight", "output.weight"),
    )
    base_model_prefix = "transformer"
    ignored = r"transformer\.h\.\d+\.attn\.(masked_)?bias"
    gguf_fixed: ClassVar = {"ffn": "gelu"}
    gguf_keys: ClassVar = {"attention.layer_norm_epsilon": "norm_eps"}
    examples = (
        ModelConfig(hidden_dim=24, norm="layer", position="learned", ffn="gelu", tie_embeddings=True, **BIASES, **EXAMPLE),
    )

    def misfits(self, config: ModelConfig) -> list[str]:
        found, width, heads = super().misfits(config), config.hidden_dim, config.num_heads
        if config.num_kv_heads != heads:
            found.append(f"num_kv_heads must be num_heads {heads}, got {config.num_kv_heads}")
        if config.head_dim * heads != width:
            found.append(f"head_dim must be hidden_dim / num_heads, got {config.head_dim}")
        return found

    def settings(self, config: ModelConfig) -> dict[str, Any]:
        dropout = {"resid_pdrop": config.dropout, "embd_pdrop": config.dropout, "attn_pdrop": 0.0}
        return {**super().settings(config), **dropout}

    def read_special(self, settings: Settings, values: Settings, where: str) -> tuple[dict[str, Any], list[str]]:
        """n_inner defaults to four times the width. Of their three dropouts we have two, which share one probability."""
        width = values["hidden_dim"]
        found: dict[str, Any] = {}
        if "intermediate_dim" not in values and type(width) is int:
            found["intermediate_dim"] = 4 * width
        resid, embd, attn = drops = [settings.get(f"{name}_pdrop", 0.1) for name in ("resid", "embd", "attn")]
        if resid == embd:
            found["dropout"] = resid
        if resid == embd and not attn:
            return found, []
        imported = f"dropout is {resid} here" if resid == embd else "none is imported"
        return found, [f"resid_pdrop, embd_pdrop and attn_pdrop are {drops}: {imported}, and attention has none"]


FAMILY = GPT2()
