"""One table of names, read in both directions."""

import pytest
import torch

from tapeless.config import ModelConfig
from tapeless.errors import ConfigError, InputError
from tapeless.interop.names import FAMILIES, check_shapes, from_hugging_face, full_names, their_shapes, to_hugging_face
from tapeless.model.transformer import transformer_specs

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


def test_what_does_not_fit_is_said_of_the_shapes_alone():
    family, config = MODELS[0]
    shapes = their_shapes(family, config)
    assert shapes == {name: tuple(w.shape) for name, w in to_hugging_face(family, config, tensors(config)).items()}
    check_shapes(family, config, shapes)
    missing = {name: shape for name, shape in shapes.items() if name != "model.layers.1.mlp.up_proj.weight"}
    with pytest.raises(InputError, match=r"configuration: model\.layers\.1\.mlp\.up_proj\.weight \(13, 24\) is missing$"):
        check_shapes(family, config, missing)
    with pytest.raises(InputError, match=r"'model\.layers\.3\.x' \(1,\) has no place here"):
        check_shapes(family, config, {**shapes, "model.layers.3.x": (1,)})
    with pytest.raises(InputError, match=r"model\.norm\.weight is \(23,\), expected \(24,\)"):
        check_shapes(family, config, {**shapes, "model.norm.weight": (23,)})
    with pytest.raises(InputError, match=r"(.* is missing; ){4}.* is missing; and 25 more"):
        check_shapes(family, config, {})


def test_gpt2_shapes_are_transposed():
    assert their_shapes(*MODELS[3])["transformer.h.0.attn.c_attn.weight"] == (24, 72)


def test_a_file_of_the_trunk_alone_has_shorter_names():
    assert full_names("GPT2LMHeadModel", {"wte.weight": 0}) == {"transformer.wte.weight": "wte.weight"}
    whole = {"transformer.wte.weight": 0, "x": 0}
    assert full_names("GPT2LMHeadModel", whole) == {name: name for name in whole}


def test_a_configuration_without_a_place():
    family, config = MODELS[0]
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM has no place for blocks\.0\.attn\.k_norm\.w"):
        to_hugging_face(family, MODELS[2][1], tensors(MODELS[2][1]))
    with pytest.raises(ConfigError, match="unknown family 'LlamaForCausal'; did you mean 'LlamaForCausalLM'"):
        to_hugging_face("LlamaForCausal", config, {})
