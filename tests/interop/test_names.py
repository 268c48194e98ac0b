"""One table of names, read in both directions."""

import pytest
import torch

from tapeless.config import ModelConfig
from tapeless.errors import ConfigError, InputError
from tapeless.interop.names import FAMILIES, from_hugging_face, to_hugging_face
from tapeless.model.params import transformer_specs

GPT2 = {"norm": "layer", "norm_bias": True, "position": "learned", "ffn": "gelu", "attn_bias": True, "ffn_bias": True}
SIZES = {"vocab_size": 23, "hidden_dim": 24, "num_layers": 3, "max_seq_len": 9, "intermediate_dim": 13}
MODELS = [
    ("LlamaForCausalLM", ModelConfig(num_kv_heads=2, **SIZES)),
    ("LlamaForCausalLM", ModelConfig(attn_bias=True, ffn_bias=True, tie_embeddings=True, **SIZES)),
    ("Qwen3ForCausalLM", ModelConfig(qk_norm=True, head_dim=10, **SIZES)),
    ("GPT2LMHeadModel", ModelConfig(tie_embeddings=True, **GPT2, **SIZES)),
]
IDS = ["llama", "llama-tied-biases", "qwen3", "gpt2"]


def tensors(config: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {spec.name: torch.randn(spec.shape, generator=generator) for spec in transformer_specs(config)}


@pytest.mark.parametrize(("family", "config"), MODELS, ids=IDS)
def test_there_and_back(family: str, config: ModelConfig):
    ours = tensors(config)
    theirs = to_hugging_face(family, config, ours)
    assert sum(t.numel() for t in theirs.values()) == sum(t.numel() for t in ours.values())
    assert all(t.is_contiguous() for t in theirs.values())
    back = from_hugging_face(family, config, theirs)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], w) for name, w in ours.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_no_name_stands_twice_in_the_table(family: str):
    theirs = [row.theirs for row in FAMILIES[family]]
    ours = [name for row in FAMILIES[family] for name in row.ours]
    assert len(set(theirs)) == len(theirs)
    assert len(set(ours)) == len(ours)


def test_gpt2_is_fused_and_transposed():
    family, config = MODELS[3]
    ours = tensors(config)
    theirs = to_hugging_face(family, config, ours)
    attention = theirs["transformer.h.1.attn.c_attn.weight"]
    assert attention.shape == (24, 72)  # (in, out)
    assert torch.equal(attention[:, 24:48], ours["blocks.1.attn.wk"].t())
    assert torch.equal(theirs["transformer.h.1.attn.c_attn.bias"][48:], ours["blocks.1.attn.bv"])
    assert torch.equal(theirs["transformer.h.2.mlp.c_proj.weight"], ours["blocks.2.ffn.w_down"].t())
    assert torch.equal(theirs["transformer.wpe.weight"], ours["pos.w"])
    assert "lm_head.weight" not in theirs


def test_a_tied_head_may_come_along():
    family, config = MODELS[3]
    theirs = to_hugging_face(family, config, tensors(config))
    theirs["lm_head.weight"] = theirs["transformer.wte.weight"]
    assert "head.w" not in from_hugging_face(family, config, theirs)


def test_what_does_not_fit_is_said():
    family, config = MODELS[0]
    theirs = to_hugging_face(family, config, tensors(config))
    missing = {name: t for name, t in theirs.items() if name != "model.layers.1.mlp.up_proj.weight"}
    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing; .* blocks\.1\.ffn\.w_up"):
        from_hugging_face(family, config, missing)
    with pytest.raises(InputError, match=r"model\.layers\.3\.x has no place in a model of this configuration"):
        from_hugging_face(family, config, {**theirs, "model.layers.3.x": torch.zeros(1)})
    with pytest.raises(InputError, match=r"model\.norm\.weight has the shape \(23,\) in our layout, expected \(24,\)"):
        from_hugging_face(family, config, {**theirs, "model.norm.weight": torch.zeros(23)})
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM has no place for blocks\.0\.attn\.k_norm\.w"):
        to_hugging_face(family, MODELS[2][1], tensors(MODELS[2][1]))
    with pytest.raises(ConfigError, match="unknown family 'LlamaForCausal'; did you mean 'LlamaForCausalLM'"):
        to_hugging_face("LlamaForCausal", config, theirs)
