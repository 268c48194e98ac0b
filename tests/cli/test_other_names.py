"""Names of other tools: accepted, or an error that says ours; and the hint of whatever else a stranger tries."""

import os
import re
from dataclasses import fields
from pathlib import Path

import pytest

from tapeless.cli.main import build_parser, main
from tapeless.cli.options import chosen
from tapeless.cli.parser import FLAG, owners_of
from tapeless.config import ModelConfig, Sampling, TrainConfig
from tapeless.config.other_names import ALIASES, NAMES, accepted, other_name


def parsed(*words: str):
    return build_parser().parse_args(list(words))


@pytest.mark.parametrize(
    ("words", "table", "field", "value"),
    [
        (["--learning-rate", "0.01"], "train", "lr", 0.01),
        (["--learning_rate=0.01"], "train", "lr", 0.01),
        (["--steps", "7"], "train", "max_steps", 7),
        (["--max_steps", "1e3"], "train", "max_steps", 1000),
        (["--output-dir", "runs/x"], "train", "out_dir", "runs/x"),
        (["--data", "my.txt"], "train", "dataset_path", "my.txt"),
        (["--model", "tiny"], "model", "num_layers", 2),
        (["--batch", "3"], "train", "batch_size", 3),
        (["--context-length", "64"], "model", "max_seq_len", 64),
        (["--set", "train.max_steps=1e3"], "train", "max_steps", 1000),
    ],
    ids=str,
)
def test_common_names_are_accepted(words, table, field, value):
    found = getattr(getattr(chosen(parsed("train", "new", *words)), table), field)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("flag", [flag for name in ALIASES if name != "preset" for flag in accepted(name)])
def test_every_alias_reaches_its_field(flag: str):
    name = next(name for name in ALIASES if flag in accepted(name))
    config = chosen(parsed("train", "new", flag, "7"))
    assert str(getattr(config.model if name == "max_seq_len" else config.train, name)) in ("7", "7.0")


def test_resume_takes_overrides_as_flags_under_either_name():
    found = vars(parsed("train", "resume", "runs/a", "--learning-rate", "0.01", "--max-steps", "1e3", "--batch", "3"))
    assert (found["train.lr"], found["train.max_steps"], found["train.batch_size"]) == (0.01, 1000, 3)


def test_no_name_of_ours_has_a_hint_to_another():
    ours = {field.name for config in (ModelConfig, TrainConfig, Sampling) for field in fields(config)}
    assert not ours & NAMES.keys()
    assert not {alias for names in ALIASES.values() for alias in names} & NAMES.keys()


def test_every_flag_that_a_hint_names_exists():
    named = {flag for hint in NAMES.values() for flag in FLAG.findall(hint)} - {"--debug"}  # of `tapeless` itself
    assert [flag for flag in named if not owners_of(flag)] == []


@pytest.mark.parametrize(
    ("command", "flag", "says"),
    [
        ("train new", "--max_iters", "here it is --max-steps"),
        ("train new", "--train.max_steps", "here it is --max-steps"),
        ("train new", "--per_device_train_batch_size", "here it is --batch-size"),
        ("train new", "--training.local_batch_size", "here it is --batch-size"),
        ("train new", "--eval.interval", "here it is --eval-every"),
        ("train new", "--gradient_checkpointing", "here it is --recompute"),
        ("train new", "--parallelism.tensor_parallel_degree", "training runs on one device"),
        ("train new", "--learning-rat", "did you mean '--learning-rate'?"),
        ("train new", "--interactive", "tapeless chat RUN"),
        ("train new", "--top-k", "--top-k is a flag of `tapeless generate`"),
        ("train new", "--zzz", "no flag of this command is similar"),
        ("generate runs/a", "--max_new_tokens", "here it is --max-tokens"),
        ("generate runs/a", "--max_iters", "here it is --max-steps, of `tapeless train new`"),
        ("generate runs/a", "--learning-rate", "--learning-rate is a flag of `tapeless train new`"),
        ("train resume runs/a", "--max_iters", "here it is --max-steps (see"),
    ],
    ids=str,
)
def test_another_name_has_a_hint(command: str, flag: str, says: str, capsys: pytest.CaptureFixture):
    assert main([*command.split(), flag, "1"]) == 2
    err = capsys.readouterr().err
    assert f"unknown flag {flag}; " in err
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train new my.txt", "did you mean --dataset-path my.txt?"),
        ("train new tiny", "did you mean --preset tiny?"),
        ("train new mine.toml", "did you mean --config mine.toml?"),
        ("train new --model mine", "did you mean --init-from mine?"),
        ("train my.txt", "did you mean `tapeless train new`?"),
        ("train", "required: ACTION: new, resume, info"),
        ("resume runs/mine", "did you mean `tapeless train resume`?"),
        ("generat mine", "did you mean 'generate'?"),
        ("generate", "RUN, a run's directory such as runs/mine"),
        ("generate nowhere", "such as runs/newest"),
        ("train resume mine", "such as runs/mine"),
        ("data prepare a.txt b.txt --out c", "SOURCE is one path: a directory, or a pattern in quotes, such as '*.txt'"),
        ("train new --lr 0", "error[OUT_OF_RANGE]: lr must be a number above 0"),
        ("train new --max-steps 2.5", "--max-steps must be int, got '2.5'"),
        ("train new --max-steps 1e300", "--max-steps must be int, got '1e300'"),
        ("train new --set train.learning_rate=1", "unknown key train.learning_rate; did you mean 'lr'?"),
        ("train new --set train.max_iters=1", "unknown key train.max_iters; here it is --max-steps"),
    ],
    ids=str,
)
def test_a_stranger_is_helped(words: str, says: str, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture):
    for age, name in enumerate(("newest", "mine")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").touch()
        os.utime(tmp_path / "runs" / name, (10**9 - age, 10**9 - age))
    if words == "generate":
        os.utime(tmp_path / "runs" / "mine")
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_help_has_the_common_options_and_help_all_every_one(capsys: pytest.CaptureFixture, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")

    def help_of(flag: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(["train", "new", flag])
        assert end.value.code == 0
        return capsys.readouterr().out

    short, full = help_of("--help"), help_of("--help-all")
    assert len(short.splitlines()) <= 45
    for field in (*fields(ModelConfig), *fields(TrainConfig)):
        flag = re.compile(rf"^  --{field.name.replace('_', '-')}[ ,]", re.M)
        assert flag.search(full)
        assert bool(flag.search(short)) == field.metadata["common"]
    assert "more options: tapeless train new --help-all" in short
    assert "more options" not in full


def test_a_dotted_name_is_looked_up_in_full_before_its_last_part():
    assert other_name("--checkpoint.interval") == "here it is --save-every"
    assert other_name("--eval.interval") == "here it is --eval-every"
    assert other_name("--lr_scheduler.warmup_steps") == "here it is --warmup-steps"
    assert other_name("--nothing.of.the.kind") is None
