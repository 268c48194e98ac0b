"""The table of a family's tensors, read in both directions."""

import pytest
import torch

from tapeless.config import ModelConfig
from tapeless.errors import ConfigError, InputError
from tapeless.interop.families import FAMILIES
from tapeless.interop.family import Family
from tapeless.model.transformer import transformer_specs

LLAMA, QWEN3, GPT2 = (FAMILIES[name] for name in ("LlamaForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel"))
GPT2_CHOICES = {"norm": "layer", "norm_bias": True, "position": "learned", "ffn": "gelu", "attn_bias": True, "ffn_bias": True}
SIZES = {"vocab_size": 23, "hidden_dim": 24, "num_layers": 3, "max_seq_len": 9, "intermediate_dim": 13}
MODELS = [
    (LLAMA, ModelConfig(num_kv_heads=2, **SIZES)),
    (LLAMA, ModelConfig(attn_bias=True, ffn_bias=True, tie_embeddings=True, **SIZES)),
    (QWEN3, ModelConfig(qk_norm=True, head_dim=10, **SIZES)),
    (GPT2, ModelConfig(tie_embeddings=True, **GPT2_CHOICES, **SIZES)),
]
IDS = ["llama", "llama-tied-biases", "qwen3", "gpt2"]


def tensors(config: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {spec.name: torch.randn(spec.shape, generator=generator) for spec in transformer_specs(config)}


@pytest.mark.parametrize(("family", "config"), MODELS, ids=IDS)
def test_round_trip(family: Family, config: ModelConfig):
    ours = tensors(config)
    theirs = family.to_hf(config, ours)
    assert sum(t.numel() for t in theirs.values()) == sum(t.numel() for t in ours.values())
    assert all(t.is_contiguous() for t in theirs.values())
    back = family.from_hf(config, theirs.__getitem__)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], w) for name, w in ours.items())


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_no_name_is_in_the_table_twice(family: Family):
    ours = [name for row in family.tensors for name in row.params]
    for names in ([row.hf for row in family.tensors], [row.gguf for row in family.tensors], ours):
        assert len(set(names)) == len(names)


def test_gpt2_is_fused_and_transposed():
    family, config = MODELS[3]
    ours = tensors(config)
    theirs = family.to_hf(config, ours)
    attention = theirs["transformer.h.1.attn.c_attn.weight"]
    assert attention.shape == (24, 72)  # (in, out)
    assert torch.equal(attention[:, 24:48], ours["blocks.1.attn.wk"].t())
    assert torch.equal(theirs["transformer.h.1.attn.c_attn.bias"][48:], ours["blocks.1.attn.bv"])
    assert torch.equal(theirs["transformer.h.2.mlp.c_proj.weight"], ours["blocks.2.ffn.w_down"].t())
    assert torch.equal(theirs["transformer.wpe.weight"], ours["pos.w"])
    assert "lm_head.weight" not in theirs


def test_a_tied_head_may_be_present():
    family, config = MODELS[3]
    theirs = family.to_hf(config, tensors(config))
    theirs["lm_head.weight"] = theirs["transformer.wte.weight"]
    assert "head.w" not in family.from_hf(config, theirs.__getitem__)


def test_wrong_tensors_are_reported_from_their_shapes():
    family, config = MODELS[0]
    shapes = family.shapes(config)
    assert shapes == {name: tuple(w.shape) for name, w in family.to_hf(config, tensors(config)).items()}
    family.check_shapes(config, shapes)
    missing = {name: shape for name, shape in shapes.items() if name != "model.layers.1.mlp.up_proj.weight"}
    with pytest.raises(
        InputError, match=r"\(LlamaForCausalLM\): model\.layers\.1\.mlp\.up_proj\.weight \(13, 24\) is missing$"
    ):
        family.check_shapes(config, missing)
    with pytest.raises(InputError, match=r"'model\.layers\.3\.x' \(1,\) is unexpected"):
        family.check_shapes(config, {**shapes, "model.layers.3.x": (1,)})
    with pytest.raises(InputError, match=r"model\.norm\.weight is \(23,\), expected \(24,\)"):
        family.check_shapes(config, {**shapes, "model.norm.weight": (23,)})
    with pytest.raises(InputError, match=r"(.* is missing; ){4}.* is missing; and 25 more"):
        family.check_shapes(config, {})


def test_gpt2_shapes_are_transposed():
    assert GPT2.shapes(MODELS[3][1])["transformer.h.0.attn.c_attn.weight"] == (24, 72)


def test_a_file_of_the_base_model_has_no_prefix():
    assert GPT2.full_names({"wte.weight": 0}) == {"transformer.wte.weight": "wte.weight"}
    whole = {"transformer.wte.weight": 0, "x": 0}
    assert GPT2.full_names(whole) == {name: name for name in whole}


def test_a_parameter_without_a_tensor():
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM has no tensor for the parameter blocks\.0\.attn\.k_norm\.w"):
        LLAMA.to_hf(MODELS[2][1], tensors(MODELS[2][1]))
