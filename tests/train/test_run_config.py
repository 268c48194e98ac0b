"""A run's configuration: what is written reads back exactly, and a resume may change only what it may."""

import math
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tapeless.config import ModelConfig, SimpleLMConfig, TrainConfig, load_preset, preset_names
from tapeless.errors import ConfigError
from tapeless.training.run_config import FREE, RunConfig, check_resume, read_run_config, write_run_config

DATA = {"tokenizer_hash": "ab12", "dataset_fingerprint": "cd34"}
RUN = RunConfig(ModelConfig(), TrainConfig(), DATA)


def round_trip(tmp_path: Path, config: RunConfig) -> RunConfig:
    write_run_config(tmp_path / "config.toml", config)
    return read_run_config(tmp_path / "config.toml")


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_reads_back_as_it_was(tmp_path: Path, preset: str):
    config = RunConfig(load_preset(preset), TrainConfig(), DATA)
    assert round_trip(tmp_path, config) == config


@pytest.mark.parametrize("lr", [0.1 + 0.2, 1e-5, 5e-324, 1e300, math.pi, 3.0])
def test_numbers_read_back_to_the_same_bits(tmp_path: Path, lr: float):
    read = round_trip(tmp_path, replace(RUN, train=TrainConfig(lr=lr, min_lr=lr / 3, eps=lr)))
    assert (read.train.lr, read.train.min_lr, read.train.eps) == (lr, lr / 3, lr)
    assert type(read.train.lr) is float


@pytest.mark.parametrize(
    "text", ["", "\n", 'a "b" \\ c', "tab\t, bell\x07, delete\x7f, nul\x00", "naïve 😀 \u2028", "[x] # = '''"]
)
def test_text_reads_back_whatever_is_in_it(tmp_path: Path, text: str):
    config = replace(RUN, train=TrainConfig(sample_prompt=text, dataset_path=text), data={"tokenizer_hash": text})
    assert round_trip(tmp_path, config) == config


def test_nothing_is_absent(tmp_path: Path):
    read = round_trip(tmp_path, replace(RUN, train=TrainConfig(max_steps=None, seq_len=7)))
    assert read.train.max_steps is None
    assert read.train.seq_len == 7
    assert "max_steps" not in (tmp_path / "config.toml").read_text()


def test_a_path_that_is_not_text_is_an_error_and_no_broken_file(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"dataset_path 'a\\udcff' is not valid Unicode"):
        round_trip(tmp_path, replace(RUN, train=TrainConfig(dataset_path="a\udcff")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\n[data]", r"expected \[model\] or \[simplelm\]"),
        ("[model]\n[simplelm]\n[train]\n[data]", "expected"),
        ("[model]\n[train]\n[data]\n[more]", "'more'"),
        ("[model]\nhiden_dim = 3\n[train]\n[data]", "did you mean 'hidden_dim'"),
        ("[model]\n[train]\nlrr = 3\n[data]", r"train\.lrr; did you mean 'lr'"),
        ("[model]\n[train]\nlr = -3.0\n[data]", "lr must be a number above 0, got -3.0"),
        ("train = 3\n[model]\n[data]", r"expected \[model\] or \[simplelm\], \[train\]"),
        ("[model", "cannot be read"),
    ],
)
def test_what_was_spoilt_by_hand_is_named(tmp_path: Path, text: str, words: str):
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_run_config(tmp_path / "config.toml")


def test_a_directory_without_a_configuration_is_no_run(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"is .* the directory of a run"):
        read_run_config(tmp_path / "config.toml")


def test_the_same_configuration_goes_on():
    assert check_resume(RUN, RUN) == []


def test_the_architecture_is_frozen_and_every_difference_is_told():
    now = replace(RUN, model=ModelConfig(hidden_dim=64, num_layers=2))
    with pytest.raises(ConfigError) as refused:
        check_resume(RUN, now, overrides=["hidden_dim", "num_layers", "head_dim"])
    assert "model.hidden_dim: 128 in the run, 64 now (fixed for the run)" in str(refused.value)
    assert "model.num_layers: 4 in the run, 2 now (fixed for the run)" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_another_kind_of_model_is_refused():
    with pytest.raises(ConfigError, match=r"model\.max_seq_len: 128 in the run, None now"):
        check_resume(RUN, replace(RUN, model=SimpleLMConfig()))


@pytest.mark.parametrize("name", DATA)
def test_the_data_are_frozen(name: str):
    moved = replace(RUN.train, dataset_path="elsewhere.txt")
    with pytest.raises(ConfigError) as refused:
        check_resume(RUN, replace(RUN, train=moved, data=DATA | {name: "ffff"}))
    assert f"data.{name}: {DATA[name]!r} in the run, 'ffff' now (fixed for the run)" in str(refused.value)
    assert "train.dataset_path: None in the run, 'elsewhere.txt' now (may change)" in str(refused.value)


def test_the_schedule_changes_by_override_alone():
    now = replace(RUN, train=TrainConfig(lr=1e-3, batch_size=4))
    with pytest.raises(ConfigError) as refused:
        check_resume(RUN, now, overrides=["batch_size"])
    assert "train.lr: 0.002 in the run, 0.001 now (needs --override lr=0.001)" in str(refused.value)
    changes = check_resume(RUN, now, overrides=["lr", "batch_size"])
    assert [(c.table, c.name, c.old, c.new, c.kind) for c in changes] == [
        ("train", "batch_size", 8, 4, "schedule"),
        ("train", "lr", 0.002, 0.001, "schedule"),
    ]


def test_intervals_and_paths_are_free():
    now = replace(RUN, train=TrainConfig(save_every=7, out_dir="elsewhere", log_every=1))
    assert {c.name: c.kind for c in check_resume(RUN, now)} == {"save_every": "free", "out_dir": "free", "log_every": "free"}


def test_what_is_free_is_a_field():
    assert {f.name for f in fields(TrainConfig)} > FREE
