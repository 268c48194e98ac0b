"""Where a value comes from: defaults < preset < --config < --set < flags; and what is said of one that cannot be."""

from dataclasses import asdict, fields
from pathlib import Path

import pytest

from tapeless.cli.main import build_parser, main
from tapeless.cli.options import chosen, field_type, setting
from tapeless.config import ModelConfig, Sampling, SimpleLMConfig, TrainConfig
from tapeless.errors import ConfigError, TapelessError, UsageError


def resolved(*words: str):
    return chosen(build_parser().parse_args(["train", "new", *words]))


def file(tmp_path: Path, text: str) -> str:
    (tmp_path / "mine.toml").write_text(text)
    return str(tmp_path / "mine.toml")


def test_without_a_word_it_is_the_defaults():
    assert resolved() == ("default", ModelConfig(), TrainConfig())


def test_each_source_overrides_the_one_before(tmp_path: Path):
    mine = file(tmp_path, "[model]\nnum_layers = 3\nnum_heads = 8\n[train]\nlr = 0.5\nbatch_size = 3\n")
    assert resolved("--preset", "tiny").model.num_layers == 2
    words = ["--preset", "tiny", "--config", mine]
    assert (resolved(*words).model.num_layers, resolved(*words).model.norm) == (3, "layer")  # the rest is still the preset's
    assert resolved(*words).train.lr == 0.5
    words += ["--set", "model.num_layers=5", "--set", "train.lr=0.25"]
    assert (resolved(*words).model.num_layers, resolved(*words).train.lr) == (5, 0.25)
    found = resolved(*words, "--num-layers", "6", "--lr", "0.125")
    assert (found.model.num_layers, found.model.num_heads, found.train.lr, found.train.batch_size) == (6, 8, 0.125, 3)
    assert found.name == mine


def test_the_order_of_words_does_not_matter():
    assert resolved("--lr", "0.125", "--set", "train.lr=0.25").train.lr == 0.125


def test_a_simplelm_takes_the_flags_it_has():
    assert resolved("--preset", "simplelm", "--hidden-dim", "16").model == SimpleLMConfig(hidden_dim=16)
    with pytest.raises(ConfigError, match="simplelm is a SimpleLM, which has no num_layers; it has vocab_size"):
        resolved("--preset", "simplelm", "--num-layers", "2")


def test_a_file_of_another_kind_than_the_preset_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"describes a \[simplelm\], preset tiny a \[model\]; use one of them"):
        resolved("--preset", "tiny", "--config", file(tmp_path, "[simplelm]\n"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "train.lrr=1"], "unknown key train.lrr; did you mean 'lr'?"),
        (["--set", "trian.lr=1"], "--set trian.lr: unknown table; did you mean 'train'?"),
        (["--set", "model.num_layer=1"], "unknown key model.num_layer; did you mean 'num_layers'?"),
        (["--set", "lr=1"], "expected TABLE.KEY=VALUE"),
        (["--set", "train.lr"], "expected TABLE.KEY=VALUE"),
        (["--set", "train.lr=fast"], "lr must be float, got 'fast'"),
        (["--set", "train.batch_size=1.5"], "batch_size must be int, got 1.5"),
        (["--set", "train.optimizer=adamv"], "optimizer is 'adamv'; did you mean 'adam'?"),
        (["--max-time", "90"], "max_time must be a number of s, m or h such as 90s, 10m or 2h, or 0, got '90'"),
        (["--max-time", "2 h"], "max_time must be a number of s, m or h"),
        (["--ema-decay", "1"], "ema_decay must be in [0, 1), got 1.0"),
        (["--lr", "0"], "lr must be a number above 0, got 0.0"),
        (["--lr", "nan"], "lr must be a number above 0, got nan"),
        (["--min-lr", "1"], "min_lr must be between 0 and lr = 0.002, got 1.0"),
        (["--batch-size", "0"], "batch_size must be at least 1, got 0"),
        (["--warmup-steps", "20", "--max-steps", "10"], "warmup_steps 20 is beyond max_steps 10"),
        (["--beta2", "1"], "beta2 must be in [0, 1), got 1.0"),
        (["--grad-clip=-1"], "grad_clip must be 0 or more, got -1.0"),
        (["--lr-shedule", "cosine"], "unknown flag --lr-shedule; did you mean '--lr-schedule'?"),
        (["--lr-schedule", "cosin"], "invalid choice: 'cosin'"),
        (["--preset", "tinny"], "unknown preset 'tinny'; did you mean 'tiny'?"),
        (["--config", "nowhere.toml"], "nowhere.toml: no such file"),
        (["--max-steps", "2.5"], "--max-steps must be int, got '2.5'"),
        (["--num", "3"], "unknown flag --num"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_one_line_that_names_the_nearest(words: list[str], says: str, capsys: pytest.CaptureFixture):
    assert main(["train", "new", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


def test_a_file_is_read_as_strictly(tmp_path: Path):
    for text, says in (
        ("[train]\nlr = 1\n", r"exactly one of the tables \[model\] and \[simplelm\] is needed"),
        ("[model]\n[train]\nmax_step = 1\n", r"mine.toml: unknown key train.max_step; did you mean 'max_steps'\?"),
        ("[model]\n[training]\n", r"unknown table \[training\]; did you mean 'train'\?"),
    ):
        with pytest.raises(ConfigError, match=says):
            resolved("--config", file(tmp_path, text))


def test_values_are_toml_or_else_text():
    assert setting("train.lr=1e-3") == ("train", "lr", 1e-3)
    assert setting("model.qk_norm=true") == ("model", "qk_norm", True)
    assert setting("train.tokenizer=char") == ("train", "tokenizer", "char")
    assert setting('train.sample_prompt="a = b"') == ("train", "sample_prompt", "a = b")
    assert setting("train.sample_prompt=a = b") == ("train", "sample_prompt", "a = b")
    with pytest.raises(UsageError, match=r"such as train.lr=1e-3"):
        setting("train")


def test_booleans_go_both_ways():
    assert resolved("--qk-norm", "--no-verify").model.qk_norm
    assert not resolved("--no-verify").train.verify
    assert resolved("--preset", "tiny", "--norm", "layer", "--no-norm-bias").model.norm_bias is False


@pytest.mark.parametrize(
    ("words", "configs"),
    [(["train", "new"], (ModelConfig, TrainConfig)), (["gradcheck"], (ModelConfig,)), (["generate"], (Sampling,))],
    ids=["train new", "gradcheck", "generate"],
)
def test_help_lists_every_field_with_its_default(words: list[str], configs: tuple[type, ...], capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as end:
        main([*words, "--help-all" if "generate" not in words else "--help"])
    assert end.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for config in configs:
        for field in fields(config):
            assert f"--{field.name.replace('_', '-')}" in out
            assert field.metadata["help"].split(";")[0].split(" (")[0] in out
            if field.default not in (None, ""):
                assert f"(default {str(field.default).lower() if field.type is bool else field.default})" in out


def test_every_flag_reaches_its_field():
    """A flag for each field, given a value that is not the default, arrives there and nowhere else."""
    for config, part in ((ModelConfig(), "model"), (TrainConfig(), "train")):
        for field in fields(config):
            flag, value = f"--{field.name.replace('_', '-')}", getattr(config, field.name)
            if field_type(field) is bool:
                words = [f"--no-{flag[2:]}" if value else flag]
            elif field.metadata["choices"]:
                words = [flag, next(choice for choice in field.metadata["choices"] if choice != value)]
            else:
                words = [flag, "0.125" if isinstance(value, float) else "16" if value == 8 else "8"]
            changed, refused = {}, ""
            try:
                changed = asdict(getattr(resolved(*words), part))
            except TapelessError as error:  # one field alone may not make sense, but the error shows that it arrived
                refused = str(error)
            differing = {name for name, now in changed.items() if now != asdict(config)[name]}
            assert field.name in differing or field.name in refused
            assert differing <= {field.name, "num_kv_heads", "head_dim"}
