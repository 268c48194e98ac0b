"""Configuration: every preset loads and has the size it states; everything wrong is an error that says what would be right."""

import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from tapeless.config import KINDS, PRESETS, ModelConfig, SimpleLMConfig, load_config, load_preset, preset_names
from tapeless.errors import ConfigError
from tapeless.model.params import count_params, transformer_specs
from tapeless.model.simple_lm import SimpleLM
from tapeless.model.transformer import Transformer

EXACT = {"tiny": 132_224, "small": 21_133_824, "cllm": 19_215_872, "simplelm": 98_688, "gpt2": 124_439_808}
BY_NAME = {"llama-124m": 124e6, "llama-350m": 350e6, "llama-1b": 1e9}


def num_params(name: str) -> int:
    config = load_preset(name)
    if isinstance(config, SimpleLMConfig):
        return SimpleLM(config).num_params
    return count_params(transformer_specs(config))  # the table alone: no memory is taken


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "model.toml"
    path.write_text(text)
    return path


def test_the_presets_that_are_promised_are_there():
    families = {"llama-tiny", "llama-cllm", "llama-small", "llama-base", "qwen3-tiny", "qwen3-small", "shakespeare-char"}
    assert {"default", *EXACT, *BY_NAME, *families} <= set(preset_names())


@pytest.mark.parametrize("name", preset_names())
def test_presets_load(name: str):
    assert num_params(name) > 0


@pytest.mark.parametrize(("name", "count"), EXACT.items())
def test_exact_sizes(name: str, count: int):
    assert num_params(name) == count


@pytest.mark.parametrize(("name", "count"), BY_NAME.items())
def test_a_name_with_a_size_tells_the_truth(name: str, count: float):
    assert num_params(name) == pytest.approx(count, rel=0.02)


def test_a_model_counts_what_its_table_does():
    assert Transformer(load_preset("tiny")).num_params == EXACT["tiny"]


@pytest.mark.parametrize("path", sorted(PRESETS.glob("*.toml")), ids=lambda path: path.stem)
def test_a_preset_states_its_reason_and_no_wrong_number(path: Path):
    first = path.read_text().splitlines()[0]
    assert first.startswith("# ")
    for count in re.findall(r"([\d,]*\d) parameters", path.read_text()):
        assert int(count.replace(",", "")) == num_params(path.stem)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_field_has_a_help_text(kind: type):
    assert all(f.metadata["help"] for f in fields(kind))


def test_configuration_is_frozen():
    with pytest.raises(FrozenInstanceError):
        ModelConfig().num_layers = 3  # type: ignore[misc]


def test_defaults_that_follow_other_fields():
    config = ModelConfig(hidden_dim=96, num_heads=6)
    assert (config.num_kv_heads, config.head_dim) == (6, 16)
    assert ModelConfig(num_heads=4, num_kv_heads=2, head_dim=10).head_dim == 10
    assert ModelConfig(rope_theta=500_000).rope_theta == 5e5  # a whole number where a float is meant


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"norm": "rsm"}, r"norm is 'rsm'; did you mean 'rms'\?"),
        ({"ffn": "swiglo"}, r"ffn is 'swiglo'; did you mean 'swiglu'\?"),
        ({"position": "sinusoidal"}, "position is 'sinusoidal'; expected one of rope, learned, none"),
        ({"init": "xaviar"}, r"did you mean 'xavier'\?"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"vocab_size": -5}, "vocab_size must be at least 1, got -5"),
        ({"num_layers": "two"}, "num_layers must be int, got 'two'"),
        ({"num_layers": 2.0}, "num_layers must be int, got 2.0"),
        ({"num_layers": True}, "num_layers must be int, got True"),
        ({"qk_norm": 1}, "qk_norm must be bool, got 1"),
        ({"num_kv_heads": "all"}, "num_kv_heads must be int, got 'all'"),
        ({"hidden_dim": 100, "num_heads": 3}, "hidden_dim 100 is not divisible by num_heads 3; change one, or set head_dim"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_heads 4 is not divisible by num_kv_heads 3"),
        ({"num_kv_heads": 0}, "num_kv_heads must be at least 1, got 0"),
        ({"head_dim": 7}, "head_dim is 7; make it even"),
        ({"norm_bias": True}, "norm_bias needs norm = 'layer'"),
        ({"norm_eps": 0.0}, "norm_eps must be above 0, got 0.0"),
        ({"rope_theta": 1.0}, "rope_theta must be above 1, got 1.0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"label_smoothing": -0.1}, r"label_smoothing must be in \[0, 1\), got -0.1"),
        ({"z_loss": -1.0}, "z_loss must be 0 or more, got -1.0"),
        ({"logit_softcap": -30.0}, "logit_softcap must be 0 or more, got -30.0"),
        ({"norm_eps": float("nan")}, "norm_eps must be above 0, got nan"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_values(values: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**values)


def test_an_odd_head_is_fine_without_rotation():
    assert ModelConfig(head_dim=7, position="none").head_dim == 7


def test_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown preset 'tinny'; did you mean 'tiny'\?"):
        load_preset("tinny")
    with pytest.raises(ConfigError, match="unknown preset 'zzzzzz'; expected one of default, cllm"):
        load_preset("zzzzzz")


def test_a_file_of_ones_own(tmp_path: Path):
    config = load_config(written(tmp_path, '[model]\nnum_layers = 3\nnorm = "layer"\n'))
    assert (config.num_layers, config.norm) == (3, "layer")
    assert load_config(written(tmp_path, "[simplelm]\nhidden_dim = 8\n")) == SimpleLMConfig(hidden_dim=8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nnum_layer = 3\n", r"model.toml: unknown key model.num_layer; did you mean 'num_layers'\?"),
        ("[simplelm]\nhiden_dim = 3\n", r"unknown key simplelm.hiden_dim; did you mean 'hidden_dim'\?"),
        ("[modell]\n", r"unknown table \[modell\]; did you mean 'model'\?"),
        ("[model]\nnum_layers = 'x'\n", "model.toml: num_layers must be int, got 'x'"),
        ("[model]\n[simplelm]\n", "exactly one of the tables"),
        ("", r"exactly one of the tables \[model\] and \[simplelm\] is needed, got 0"),
        ("model = 3\n", r"model must be a table, \[model\]"),
        ("[model\n", "not a TOML file"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load_config(written(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere.toml: no such file"):
        load_config(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
