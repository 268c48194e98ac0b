"""The registry: which models a family expresses, and config.json in both directions."""

import re

import pytest
from interop_fixtures import CASES, config_of

from tapeless.config import ModelConfig, load_preset, preset_names
from tapeless.errors import ConfigError
from tapeless.interop import family
from tapeless.interop.families import FAMILIES, family_named, family_of, register
from tapeless.model.params import ParamSpec
from tapeless.model.transformer import transformer_specs


@pytest.mark.parametrize("case", CASES)
def test_config_json_round_trip(case: str):
    family, config = FAMILIES[CASES[case][0]], config_of(case)
    assert family_of(config) is family
    assert family.completed(config) == config
    assert family_named({"architectures": [family.name]}, "here") is family
    assert family.read_settings(family.settings(config), "here") == (config, [])


def test_every_preset_has_a_family_or_the_reason_why_not():
    families = {}
    for name in preset_names():
        try:
            families[name] = family_of(load_preset(name)).name
        except ConfigError as error:
            families[name] = str(error)
    assert families["default"] == families["llama-tiny"] == "LlamaForCausalLM"
    assert families["qwen3-small"] == "Qwen3ForCausalLM"
    assert families["gpt2"] == "GPT2LMHeadModel"
    assert "norm must be 'rms', got 'layer'" in families["tiny"]
    assert "norm_placement must be 'pre', got 'post'" in families["cllm"]
    assert "SimpleLM" in families["simplelm"]


def test_each_fixed_field_is_one_reason():
    other = {"norm": {"rms": "layer", "layer": "rms"}, "norm_placement": {"pre": "post"}, "logit_softcap": {0.0: 9.0}}
    other |= {
        "position": {"rope": "learned", "learned": "rope"},
        "qk_norm": {False: True, True: False},
        "ffn_bias": {False: True},
    }
    other["blocks"] = {"attn+ffn": "attn+ffn/ffn"}
    for case in ("llama", "qwen3", "gpt2"):
        family, choices = FAMILIES[CASES[case][0]], CASES[case][1]
        for field, value in family.fixed.items():
            changed = {**choices, field: other[field][value]} | ({"norm_bias": False} if field == "norm" else {})
            assert len(family.misfits(ModelConfig(**changed))) == 1, field


def test_settings_that_matter_in_training_only():
    config = ModelConfig(dropout=0.1, label_smoothing=0.2)
    assert len(FAMILIES["LlamaForCausalLM"].training_notes(config)) == 2
    assert len(FAMILIES["GPT2LMHeadModel"].training_notes(config)) == 1


@pytest.mark.parametrize("blocks", ["shift+ffn", "attn(num_kv_heads=1)+ffn/attn+ffn"])
def test_other_sublayers_and_settings_of_single_layers_are_refused(blocks: str):
    with pytest.raises(ConfigError, match=re.escape(f"LlamaForCausalLM, but there blocks must be 'attn+ffn', got {blocks!r}")):
        family_of(ModelConfig(blocks=blocks))


def test_a_parameter_without_a_tensor_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    config, shift = config_of("llama"), ParamSpec("blocks.1.shift.w_gate", (24,), "zeros", False, None)
    monkeypatch.setattr(family, "transformer_specs", lambda config: [*transformer_specs(config), shift])
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM has no tensor for the parameter blocks\.1\.shift\.w_gate"):
        FAMILIES["LlamaForCausalLM"].shapes(config)


def test_a_family_is_registered_once():
    with pytest.raises(ConfigError, match="LlamaForCausalLM is registered twice"):
        register(FAMILIES["LlamaForCausalLM"])
