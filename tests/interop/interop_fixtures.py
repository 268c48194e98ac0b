"""Small models of every family with random weights, and the directories they are exported to."""

import json
from pathlib import Path
from typing import Any

import torch

from tapeless.config import ModelConfig
from tapeless.data.tokenizer import CharTokenizer
from tapeless.interop.generation import Generation
from tapeless.interop.hf_export import export_hugging_face
from tapeless.model.transformer import Transformer

TOKENIZER = CharTokenizer("abcdefghijklmnopqrstuvw")  # 23
GPT2 = {"norm": "layer", "norm_bias": True, "position": "learned", "ffn": "gelu", "attn_bias": True, "ffn_bias": True}
SIZES = {"vocab_size": 23, "hidden_dim": 24, "num_layers": 2, "max_seq_len": 9, "intermediate_dim": 13}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"num_kv_heads": 2}),
    "llama-tied-biases": ("LlamaForCausalLM", {"attn_bias": True, "ffn_bias": True, "tie_embeddings": True}),
    "llama-odd": ("LlamaForCausalLM", {"head_dim": 10, "num_kv_heads": 1, "rope_theta": 5e5, "norm_eps": 1e-3}),
    "llama-geglu": ("LlamaForCausalLM", {"ffn": "geglu", "num_layers": 1, "num_heads": 3}),
    "qwen3": ("Qwen3ForCausalLM", {"qk_norm": True, "num_kv_heads": 2, "head_dim": 10}),
    "qwen3-tied": ("Qwen3ForCausalLM", {"qk_norm": True, "hidden_dim": 22, "head_dim": 6, "tie_embeddings": True}),
    "qwen3-biases": ("Qwen3ForCausalLM", {"qk_norm": True, "attn_bias": True, "num_kv_heads": 1, "rope_theta": 1e3}),
    "gpt2": ("GPT2LMHeadModel", {**GPT2, "tie_embeddings": True}),
    "gpt2-untied": ("GPT2LMHeadModel", {**GPT2, "num_heads": 3, "norm_eps": 1e-3, "intermediate_dim": 31}),
    "gpt2-relu2": ("GPT2LMHeadModel", {**GPT2, "ffn": "relu2", "dropout": 0.1}),
}


def config_of(case: str) -> ModelConfig:
    return ModelConfig(**{**SIZES, **CASES[case][1]})


def model_of(config: ModelConfig, seed: int = 0) -> Transformer:
    """Norms not 1, biases not 0: initial values would hide mistakes."""
    model = Transformer(config, seed=seed, initialized=False)
    generator = torch.Generator().manual_seed(seed)
    for name, w in model.params.items():
        w.copy_(torch.randn(w.shape, generator=generator) * 0.3 + ("norm.w" in name))
    return model


def exported(folder: Path, case: str = "llama", **options: Any) -> tuple[Path, Transformer]:
    """A directory of that family, and the exported model."""
    model = model_of(config_of(case))
    out = folder / case
    export_hugging_face(out, model.config, model.params, TOKENIZER, Generation(), **options)
    return out, model


def tokens(vocab_size: int = 23, length: int = 9) -> torch.Tensor:  # (2, length)
    return torch.randint(vocab_size, (2, length), generator=torch.Generator().manual_seed(1))


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
