"""config.json by one table, there and back, for every family."""

import pytest
from interop_fixtures import CASES, config_of

from tapeless.config import ModelConfig, load_preset, preset_names
from tapeless.errors import ConfigError
from tapeless.interop.families import FAMILIES, completed, family_of, misfits, read_settings, their_settings, training_notes


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case: str):
    family, config = CASES[case][0], config_of(case)
    assert family_of(config) == family
    assert completed(family, config) == config
    found = read_settings({"architectures": [family], **their_settings(family, config)}, "here")
    assert found == (family, config, [])


def test_every_preset_has_a_family_or_the_reason_why_not():
    families = {}
    for name in preset_names():
        try:
            families[name] = family_of(load_preset(name))
        except ConfigError as error:
            families[name] = str(error)
    assert families["default"] == families["llama-tiny"] == "LlamaForCausalLM"
    assert families["qwen3-small"] == "Qwen3ForCausalLM"
    assert families["gpt2"] == "GPT2LMHeadModel"
    assert "norm is 'layer', there 'rms'" in families["tiny"]
    assert "norm_placement is 'post', there 'pre'" in families["cllm"]
    assert "SimpleLM" in families["simplelm"]


def test_each_fixed_choice_stands_in_the_way_alone():
    other = {"norm": {"rms": "layer", "layer": "rms"}, "norm_placement": {"pre": "post"}, "logit_softcap": {0.0: 9.0}}
    other |= {
        "position": {"rope": "learned", "learned": "rope"},
        "qk_norm": {False: True, True: False},
        "ffn_bias": {False: True},
    }
    for case in ("llama", "qwen3", "gpt2"):
        family, choices = CASES[case]
        for field, value in FAMILIES[family].fixed.items():
            changed = {**choices, field: other[field][value]} | ({"norm_bias": False} if field == "norm" else {})
            assert len(misfits(family, ModelConfig(**changed))) == 1, field


def test_what_is_of_training_alone():
    config = ModelConfig(dropout=0.1, label_smoothing=0.2)
    assert len(training_notes("LlamaForCausalLM", config)) == 2
    assert len(training_notes("GPT2LMHeadModel", config)) == 1
