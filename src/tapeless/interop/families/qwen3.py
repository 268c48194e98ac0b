"""Qwen3: a Llama with QK-norm, without feed-forward biases. In GGUF it rotates halves, as we do."""

from typing import ClassVar

from tapeless.config import ModelConfig
from tapeless.interop.families.llama import ROTARY_TENSORS, Llama
from tapeless.interop.family import EXAMPLE, Row


class Qwen3(Llama):
    name = "Qwen3ForCausalLM"
    model_type = gguf_architecture = "qwen3"
    fixed: ClassVar = {**Llama.fixed, "qk_norm": True, "ffn_bias": False}
    divisible = False
    keys: ClassVar = {
        **{key: value for key, value in Llama.keys.items() if key != "mlp_bias"},
        "head_dim": ("head_dim", 128),
        "max_position_embeddings": ("max_seq_len", 32768),
    }
    neutral: ClassVar = {"use_sliding_window": (False, None)}
    tensors = (
        *ROTARY_TENSORS,
        Row(("blocks.{i}.attn.q_norm.w",), "model.layers.{i}.self_attn.q_norm.weight", "blk.{i}.attn_q_norm.weight"),
        Row(("blocks.{i}.attn.k_norm.w",), "model.layers.{i}.self_attn.k_norm.weight", "blk.{i}.attn_k_norm.weight"),
    )
    gguf_fixed: ClassVar = {"ffn": "swiglu", "attn_bias": False}
    examples = (ModelConfig(hidden_dim=22, num_kv_heads=2, head_dim=6, qk_norm=True, rope_theta=1e3, **EXAMPLE),)


FAMILY = Qwen3()
