"""Configuration: every preset loads and has the size it states; everything wrong is an error that says what would be right."""

import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from tapeless.config import (
    PRESETS,
    TABLES,
    ModelConfig,
    Sampling,
    SimpleLMConfig,
    TrainConfig,
    load_config,
    load_preset,
    preset_names,
    preset_recipe,
    read_recipe,
)
from tapeless.errors import ConfigError
from tapeless.model.params import count_params
from tapeless.model.simple_lm import SimpleLM
from tapeless.model.transformer import Transformer, transformer_specs

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


@pytest.mark.parametrize("kind", [*TABLES.values(), Sampling])
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
        ({"num_layers": 0}, "num_layers must be in .1, 10000., got 0"),
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
        ({"num_layers": 10**8}, "num_layers must be in .1, 10000., got 100000000"),
        ({"norm_eps": 1e300}, "norm_eps must be above 0, below 1, got 1e.300"),
        ({"norm_eps": 0.0}, "norm_eps must be above 0, below 1, got 0.0"),
        ({"rope_theta": 1.0}, "rope_theta must be above 1, got 1.0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"label_smoothing": -0.1}, r"label_smoothing must be in \[0, 1\), got -0.1"),
        ({"z_loss": -1.0}, "z_loss must be 0 or more, got -1.0"),
        ({"logit_softcap": -30.0}, "logit_softcap must be 0 or more, got -30.0"),
        ({"norm_eps": float("nan")}, "norm_eps must be above 0, below 1, got nan"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_values(values: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": 0.0}, "lr must be a number above 0, got 0.0"),
        ({"lr": float("inf")}, "lr must be a number above 0, got inf"),
        ({"min_lr": 0.1}, "min_lr must be between 0 and lr = 0.002, got 0.1"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"max_steps": 0}, "max_steps must be at least 1, got 0"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"epochs": 1.5}, "epochs must be int or nothing, got 1.5"),
        ({"max_steps": 10, "warmup_steps": 11}, "warmup_steps 11 is beyond max_steps 10"),
        ({"beta1": 1.0}, r"beta1 must be in \[0, 1\), got 1.0"),
        ({"weight_decay": -0.1}, "weight_decay must be 0 or more, got -0.1"),
        ({"grad_clip": float("nan")}, "grad_clip must be 0 or more, got nan"),
        ({"optimizer": "adamm"}, r"optimizer is 'adamm'; did you mean 'adam'\?"),
        ({"lr_schedule": "warmup"}, r"did you mean 'warmup-cosine'\?"),
        ({"dtype": "float16"}, r"dtype is 'float16'; did you mean 'bfloat16'\?"),
        ({"nesterov": True, "momentum": 0.0}, "momentum must be above 0 for nesterov, got 0.0"),
        ({"seed": -1}, "seed must be 0 or more, got -1"),
        ({"keep_last": 0}, "keep_last must be at least 1, got 0"),
        ({"dataset_path": 3}, "dataset_path must be str or nothing, got 3"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_values_of_training(values: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0 or more, got -0.1"),
        ({"top_k": -1}, "top_k must be 0 or more, got -1"),
        ({"top_p": 0.0}, "top_p must be above 0, at most 1, got 0.0"),
        ({"min_p": 1.1}, "min_p must be between 0 and 1, got 1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0, got 0.0"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_values_of_sampling(values: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        Sampling(**values)


def test_a_recipe_has_a_model_and_may_have_its_training(tmp_path: Path):
    recipe = read_recipe(written(tmp_path, "[model]\nnum_layers = 3\n[train]\nlr = 1e-3\nmax_steps = 5\n"))
    assert recipe == ("model", {"num_layers": 3}, {"lr": 1e-3, "max_steps": 5})
    assert preset_recipe("default") == ("model", {}, {})


@pytest.mark.parametrize("name", preset_names())
def test_the_training_of_a_preset_is_valid(name: str):
    TrainConfig(**preset_recipe(name).train)


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
        ("[model]\n[train]\nlrr = 1\n", r"model.toml: unknown key train.lrr; did you mean 'lr'\?"),
        ("[model]\n[train]\nlr = -1\n", "model.toml: lr must be a number above 0, got -1.0"),
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
