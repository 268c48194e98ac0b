"""Runs as a whole, most of it through the command: what is made, what may change, who may write, what is loaded."""

import json
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_fixtures import MODEL, begin_run, config, events, play, text_file

from tapeless.cli.main import main
from tapeless.config import TrainConfig
from tapeless.data.files import unused_path
from tapeless.errors import CheckpointError, ConfigError, DataError, LockedError
from tapeless.training import runs
from tapeless.training.checkpoint import checkpoints, pointed
from tapeless.training.metrics_log import read_metrics
from tapeless.training.run_config import read_run_config
from tapeless.training.run_dir import RunDir
from tapeless.training.runs import Recorder, create_run, load, resume_config

FLAGS = shlex.split(
    "--hidden-dim 16 --num-layers 1 --num-heads 2 --intermediate-dim 24 --max-seq-len 8 --batch-size 2 --no-verify "
    "--max-steps 6 --save-every 2 --eval-every 3 --sample-tokens 5"
)


def command(tmp_path: Path, *more: str) -> tuple[int, RunDir]:
    data = text_file(tmp_path, 700)
    run = RunDir(tmp_path / "run")
    return main(["train", "new", *FLAGS, "--dataset-path", data, "--out-dir", str(run.path), *more]), run


def test_a_run_leaves_everything_a_resume_needs(tmp_path: Path):
    code, run = command(tmp_path)
    assert code == 0
    names = {path.name for path in run.path.iterdir()}
    assert names >= {"config.toml", "env.json", "metrics.jsonl", "tokenizer.json", "samples", "checkpoints", "lock"}
    assert names >= {"train.bin", "val.bin", "data.json"}
    (tmp_path / "text.txt").unlink()  # its data are its own
    assert main(["train", "resume", str(run.path), "--override", "max_steps=8"]) == 0
    assert pointed(run.checkpoints, "latest") == 8


def test_names_do_not_collide(tmp_path: Path):
    assert unused_path("tiny", tmp_path) == tmp_path / "tiny"
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny-2").mkdir()
    assert unused_path("tiny", tmp_path) == tmp_path / "tiny-3"
    assert unused_path("folder/mine.toml", tmp_path) == tmp_path / "mine"


def test_a_run_that_cannot_begin_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(DataError, match="no such file"):
        create_run(MODEL, TrainConfig(dataset_path=str(tmp_path / "nowhere.txt")), tmp_path / "run", [])
    assert not (tmp_path / "run").exists()

    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "prepare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        create_run(MODEL, TrainConfig(), tmp_path / "run", [])
    assert not (tmp_path / "run").exists()


def test_a_directory_in_use_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _, run = command(tmp_path)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    code, _ = command(tmp_path)
    assert code == 2
    assert "is not empty" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_an_override_of_the_schedule_is_recorded(tmp_path: Path):
    _, run = command(tmp_path)
    assert main(["train", "resume", str(run.path), "--override", "max_steps=9", "--override", "lr=0.0005"]) == 0
    assert [event["changes"] for event in events(run, ["start", "resume"])] == [
        {},
        {"max_steps": [6, 9], "lr": [TrainConfig().lr, 0.0005]},
    ]
    train = read_run_config(run.config).train
    assert (train.max_steps, train.lr) == (9, 0.0005)
    assert all(event["lr"] <= 0.0005 for event in events(run, ["step"])[6:])
    assert main(["train", "resume", str(run.path)]) == 0  # with what was recorded
    assert [event["step"] for event in events(run, ["step"])] == list(range(1, 10))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("hidden_dim=32", "model.hidden_dim: 16 in the run, 32 now (fixed for the run)"),
        ("tie_embeddings=true", "model.tie_embeddings: False in the run, True now (fixed for the run)"),
        ("max_step=3", "did you mean 'max_steps'"),
        ("lr=-1", "lr must be a number above 0, got -1"),
        ("dropout=0.1", "model.dropout: 0.0 in the run, 0.1 now (fixed for the run)"),
    ],
)
def test_what_is_frozen_or_wrong_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, words: str):
    _, run = command(tmp_path)
    before = run.config.read_bytes()
    assert main(["train", "resume", str(run.path), "--override", override]) == 2
    assert words in capsys.readouterr().err
    assert run.config.read_bytes() == before


def test_every_frozen_difference_is_in_one_line(tmp_path: Path):
    run = begin_run(tmp_path / "run", config())
    with pytest.raises(ConfigError) as refused:
        resume_config(run, {"hidden_dim": 32, "num_layers": 3, "lr": 0.5})
    told = str(refused.value)
    assert "model.hidden_dim: 16 in the run, 32 now (fixed for the run)" in told
    assert "model.num_layers: 2 in the run, 3 now (fixed for the run)" in told
    assert "train.lr: 0.01 in the run, 0.5 now" in told
    assert "\n" not in told


def test_altered_data_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _, run = command(tmp_path)
    tokens = bytearray((run.path / "train.bin").read_bytes())
    tokens[-2] ^= 1
    (run.path / "train.bin").write_bytes(tokens)
    assert main(["train", "resume", str(run.path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error[CHANGED]: ")
    assert re.search(r"data\.dataset_fingerprint: .[0-9a-f]{64}. in the run, .[0-9a-f]{64}. now \(fixed for the run\)", err)


def test_one_process_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _, run = command(tmp_path)
    lines = run.metrics.read_bytes()
    with Recorder(run):
        with pytest.raises(LockedError, match=f"in use by process {os.getpid()}"):
            Recorder(run)
        assert main(["train", "resume", str(run.path)]) == 2
        assert f"in use by process {os.getpid()}" in capsys.readouterr().err
        assert run.metrics.read_bytes() == lines
    assert main(["train", "resume", str(run.path)]) == 0


def test_what_a_killed_process_left_is_cleared(tmp_path: Path):
    _, run = command(tmp_path)
    (run.checkpoints / ".tmp-99-step-00000008").mkdir()
    with Recorder(run):
        assert not list(run.checkpoints.glob(".tmp-*"))


def test_a_run_that_diverges_exits_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, run = command(tmp_path, "--lr", "1e25", "--warmup-steps", "3", "--grad-clip", "0", "--save-every", "1")
    assert code == 4
    assert "error[NONFINITE]" in capsys.readouterr().err
    (guard,) = events(run, ["guard"])
    assert guard["error"]
    for step in checkpoints(run.checkpoints):
        model = load(run.path, which=str(step), on_warning=pytest.fail).model
        assert torch.isfinite(model.store.flat).all()
    assert main(["train", "resume", str(run.path)]) == 4  # the same again: the lock is free, nothing is left half done
    assert len(events(run, ["guard"])) == 1


def test_a_model_is_loaded_from_the_checkpoint_that_is_named(tmp_path: Path):
    run = begin_run(tmp_path / "run", config(save_every=2, keep_last=9))
    _, trainer = play(run)
    assert load(run.path, on_warning=pytest.fail).checkpoint.state["step"] == 12
    assert torch.equal(load(run.path, on_warning=pytest.fail).model.store.flat, trainer.model.store.flat)
    best = load(run.path, which="best", on_warning=pytest.fail)
    assert best.checkpoint.state["step"] == trainer.best_step
    assert load(run.path, which="4", on_warning=pytest.fail).checkpoint.state["step"] == 4
    for wrong in ("7", "first", "-4"):
        with pytest.raises(CheckpointError, match=rf"has no checkpoint '{wrong}'; there are latest, best, 2, "):
            load(run.path, which=wrong, on_warning=pytest.fail)


def test_a_model_without_attention_is_loaded_too(tmp_path: Path):
    data = text_file(tmp_path, 700)
    flags = ["--preset", "simplelm", "--seq-len", "8", "--max-steps", "2", "--no-verify", "--dataset-path", data]
    assert main(["train", "new", *flags, "--out-dir", str(tmp_path / "simple")]) == 0
    loaded = load(tmp_path / "simple", on_warning=pytest.fail)
    assert loaded.model.num_params == 98_688


def test_every_line_of_a_run_is_one_event(tmp_path: Path):
    _, run = command(tmp_path)
    for line, event in zip(run.metrics.read_bytes().splitlines(), read_metrics(run.metrics), strict=True):
        assert json.loads(line) == event
        assert {"event", "step", "time"} <= event.keys()


def test_auto_is_resolved_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A run computes as it began, wherever it goes on."""
    asked = TrainConfig(dataset_path=str(text_file(tmp_path, 700)), dtype="auto", max_steps=2)
    run, found, _ = create_run(MODEL, asked, tmp_path / "run", [])
    assert found.train.dtype in ("float32", "bfloat16")
    assert f"dtype auto is {found.train.dtype}" in caplog.text
    assert read_run_config(run.config).train.dtype == found.train.dtype
    again, _ = resume_config(run, {"dtype": "auto"})
    assert again.train.dtype in ("float32", "bfloat16")


def test_steps_reach_the_file_and_delayed_listeners_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In order, at the latest with the next other event or after DELAY; other listeners hear of each at once."""
    run, now, at_once, later = RunDir.create(tmp_path / "run"), [100.0], [], []
    monkeypatch.setattr("tapeless.training.runs.time.perf_counter", lambda: now[0])

    def steps(events: Iterable[dict[str, Any]]) -> list[int]:
        return [event["step"] for event in events]

    with Recorder(run, at_once.append, delayed=[later.append]) as record:
        for step, seconds, received in [(1, 0.0, 1), (2, 0.05, 1), (3, 0.04, 1), (4, 0.02, 4), (5, 0.0, 4)]:
            now[0] += seconds
            record({"event": "step", "step": step})
            assert len(at_once) == step
            assert steps(later) == steps(read_metrics(run.metrics)) == list(range(1, received + 1))
        record({"event": "eval", "step": 5})
        assert steps(later) == steps(read_metrics(run.metrics)) == [1, 2, 3, 4, 5, 5]
        record({"event": "step", "step": 6})
        record.deliver()
        assert steps(later) == steps(read_metrics(run.metrics)) == [1, 2, 3, 4, 5, 5, 6]
