"""`tapeless.train` and `tapeless.resume`: what the commands do, from Python, with callbacks."""

import dataclasses
import errno
import json
import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from run_fixtures import MODEL, config, dataset, events, final_bytes, text_file

import tapeless
from tapeless import STOP, resume, train
from tapeless.cli.main import main
from tapeless.data.files import file_sha256
from tapeless.errors import ConfigError, GradientError, WriteError
from tapeless.training import checkpoint
from tapeless.training.checkpoint import pointed
from tapeless.training.run_config import read_run_config, write_run_config
from tapeless.training.run_dir import RunDir
from tapeless.training.signals import SIGNALS

FEW: dict[str, Any] = {"batch_size": 2, "max_steps": 6, "eval_every": 3, "save_every": 3, "sample_tokens": 4, "verify": False}
FLAGS = [
    "--hidden-dim",
    "16",
    "--num-layers",
    "2",
    "--num-heads",
    "2",
    "--intermediate-dim",
    "24",
    "--vocab-size",
    "256",
    "--max-seq-len",
    "8",
]


def test_the_command_and_the_function_give_the_same_run(tmp_path: Path):
    data = text_file(tmp_path, 700)
    result = train(MODEL, data, out_dir=tmp_path / "a", display=None, **FEW)
    words = [f"--{key.replace('_', '-')}={value}" for key, value in FEW.items() if key != "verify"]
    assert main(["train", "new", *FLAGS, *words, "--no-verify", "--dataset-path", data, "--out-dir", str(tmp_path / "b")]) == 0
    a, b = RunDir(tmp_path / "a"), RunDir(tmp_path / "b")
    assert final_bytes(a) == final_bytes(b)
    assert events(a) == events(b)
    assert {path.name for path in a.path.iterdir()} == {path.name for path in b.path.iterdir()}
    assert (result.path, result.reason, result.step) == (tmp_path / "a", "done", 6)
    steps = [event for event in result.events() if event["event"] == "step"]
    evals = [event for event in result.events() if event["event"] == "eval"]
    assert (result.loss, result.val_loss) == (steps[-1]["loss"], evals[-1]["val_loss"])
    assert result.best_val_loss == min(event["val_loss"] for event in evals)
    loaded = tapeless.load(tmp_path / "a")
    assert torch.equal(loaded.store.flat, result.model.store.flat)
    assert loaded.generate("the ", max_tokens=8) == result.model.generate("the ", max_tokens=8)


def test_a_callback_sees_every_event_and_cannot_change_them(tmp_path: Path):
    seen: list[dict[str, Any]] = []

    def spoil(event: dict[str, Any]) -> None:
        seen.append(dict(event))
        event.clear()

    result = train(MODEL, text_file(tmp_path, 700), out_dir=tmp_path / "run", callbacks=[spoil, spoil], display=None, **FEW)
    assert json.loads(json.dumps(seen[::2])) == result.events()
    assert seen[::2] == seen[1::2]
    assert [seen[0]["event"], seen[-1]["event"]] == ["start", "end"]


@pytest.mark.parametrize("kind", ["start", "step", "layer_stats", "eval", "checkpoint"])
def test_a_callback_stops_the_run_and_it_resumes_to_the_same_bits(tmp_path: Path, kind: str):
    data = text_file(tmp_path, 700)
    whole = train(MODEL, data, out_dir=tmp_path / "whole", display=None, **FEW)
    stop = lambda event: STOP if event["event"] == kind else None  # noqa: E731
    stopped = train(MODEL, data, out_dir=tmp_path / "run", callbacks=[stop], display=None, **FEW)
    assert stopped.reason == "stopped"
    assert stopped.step == pointed(RunDir(stopped.path).checkpoints, "latest") < 6
    assert stopped.events()[-1]["reason"] == "stopped"
    resumed = resume(stopped.path, display=None)
    assert resumed.reason == "done"
    assert final_bytes(RunDir(resumed.path)) == final_bytes(RunDir(whole.path))
    kinds = ["step", "layer_stats", "eval", "sample"]
    assert events(RunDir(resumed.path), kinds) == events(RunDir(whole.path), kinds)


def test_an_exception_in_a_callback_is_raised_after_the_work_is_saved(tmp_path: Path):
    calls = []

    def fail(event: dict[str, Any]) -> None:
        calls.append(event["event"])
        if event["event"] == "step" and event["step"] == 2:
            raise KeyError("mine")

    data = text_file(tmp_path, 700)
    with pytest.raises(KeyError, match="mine"):
        train(MODEL, data, out_dir=tmp_path / "run", callbacks=[fail], display=None, **FEW)
    run = RunDir(tmp_path / "run")
    assert pointed(run.checkpoints, "latest") == 2
    assert calls[-1] == "step"  # it is not called again
    assert events(run, ["end"])[-1]["reason"] == "stopped"
    whole = train(MODEL, data, out_dir=tmp_path / "whole", display=None, **FEW)
    assert final_bytes(RunDir(resume(run.path, display=None).path)) == final_bytes(RunDir(whole.path))


def test_settings_may_come_as_preset_file_model_or_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    data = text_file(tmp_path, 700)
    (tmp_path / "mine.toml").write_text("[model]\nnum_layers = 1\nmax_seq_len = 8\n[train]\nmax_steps = 1\nverify = false\n")
    one = {"max_steps": 1, "verify": False, "display": None, "sample_tokens": 1}
    assert train("mine.toml", data, display=None, sample_tokens=1).path == Path("runs/mine")
    assert train(Path("mine.toml"), data, display=None, sample_tokens=1).path == Path("runs/mine-2")
    assert train("tiny", data, seq_len=8, **one).path == Path("runs/tiny")
    assert train((MODEL, config(max_steps=1)), data, display=None).step == 1
    found = read_run_config(RunDir(train((MODEL, config(lr=0.5)), data, **one, lr=0.25).path).config)
    assert (found.model, found.train.lr, found.train.batch_size) == (MODEL, 0.25, 2)
    with pytest.raises(ConfigError, match="unknown preset 'tini'; did you mean 'tiny'"):
        train("tini", data, **one)
    with pytest.raises(ConfigError, match=r"unknown key train\.max_step; did you mean 'max_steps'"):
        train("tiny", data, max_step=1)
    with pytest.raises(ConfigError, match="config is a int; expected a preset's name"):
        train(3, data, **one)
    with pytest.raises(ConfigError, match="display is 'loud'"):
        train("tiny", data, display="loud")


def test_a_dataset_and_the_weights_of_another_run(tmp_path: Path):
    data = dataset(tmp_path)
    first = train(MODEL, data, out_dir=tmp_path / "first", display=None, **FEW)
    assert file_sha256(first.path / "train.bin") == file_sha256(tmp_path / "data" / "train.bin")
    second = train("default", data, out_dir=tmp_path / "second", init_from=str(first.path), display=None, **FEW)
    assert second.model.config == MODEL
    assert second.events()[1]["loss"] < first.events()[1]["loss"]


def test_wrong_gradients_are_an_error_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tapeless.verify import first_batch

    found = first_batch.Finding("L2", "first batch", "float64", "embed.w", 1.0, 1e-3, "")
    monkeypatch.setattr(first_batch, "first_batch_findings", lambda *args: [found])
    with pytest.raises(GradientError, match="1 of 1 gradient checks failed"):
        train(MODEL, text_file(tmp_path, 700), out_dir=tmp_path / "run", display=None, max_steps=1)
    assert events(RunDir(tmp_path / "run")) == []


def test_in_a_thread_without_signals(tmp_path: Path):
    """As a notebook may run it: Python allows signal handlers in the main thread only."""
    data, results = text_file(tmp_path, 700), []
    before = [signal.getsignal(number) for number in SIGNALS]
    threads = [
        Thread(target=lambda name=name: results.append(train(MODEL, data, out_dir=tmp_path / name, display=None, **FEW)))
        for name in ("a", "b")
    ]
    for thread in threads:
        thread.start()
        thread.join()
    assert [result.reason for result in results] == ["done", "done"]
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_nothing_is_printed_and_no_setting_of_the_process_stays(tmp_path: Path, capfd: pytest.CaptureFixture):
    before = torch.get_num_threads()
    settings = FEW | {"threads": 1, "deterministic": True}
    train(MODEL, text_file(tmp_path, 700), out_dir=tmp_path / "run", display=None, **settings)
    assert capfd.readouterr() == ("", "")
    assert torch.get_num_threads() == before
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_resume_on_another_machine_announces_what_differs(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    data = text_file(tmp_path, 700)
    stop = lambda event: STOP if event["event"] == "checkpoint" else None  # noqa: E731
    path = train(MODEL, data, out_dir=tmp_path / "run", callbacks=[stop], display=None, dtype="bfloat16", **FEW).path
    result = resume(path, display=None, dtype="float32", ops="reference", threads=1)
    assert result.reason == "done"
    assert "the last bits may differ from an uninterrupted run: dtype was bfloat16, is float32" in caplog.text
    assert read_run_config(RunDir(path).config).train.dtype == "float32"


def test_what_a_resume_does_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A finished run has nothing to do; one that is extended starts its schedule again where that has a higher rate."""
    train(MODEL, text_file(tmp_path, 700), out_dir=tmp_path / "run", display=None, ops="reference", **FEW)
    assert caplog.messages == []
    resume(tmp_path / "run", display=None)
    assert caplog.messages == ["all 6 steps are done already; --max-steps 12 trains for longer"]
    caplog.clear()
    resume(tmp_path / "run", display=None, max_steps=12)
    announced, rising = caplog.messages
    assert announced == "the steps from here on differ from those of an unchanged run: max_steps was 6, is 12"
    assert "the learning rate rises from " in rising
    assert "--lr-schedule constant --lr " in rising
    caplog.clear()
    resume(tmp_path / "run", display=None, max_steps=13, lr_schedule="constant", lr=1e-6, min_lr=1e-7)
    changed = "max_steps was 12, is 13; lr was 0.002, is 1e-06; min_lr was not set, is 1e-07; "
    changed += "lr_schedule was warmup-cosine, is constant"
    assert caplog.messages == [f"the steps from here on differ from those of an unchanged run: {changed}"]


def test_windows_longer_than_the_model_is_for_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="seq_len 16 is beyond max_seq_len 8; give --max-seq-len 16 too"):
        train(MODEL, text_file(tmp_path, 700), out_dir=tmp_path / "run", display=None, seq_len=16)
    assert not (tmp_path / "run").exists()


def test_a_run_of_another_machine_says_what_to_override(tmp_path: Path):
    path = train(MODEL, text_file(tmp_path, 700), out_dir=tmp_path / "run", display=None, **FEW).path
    recorded = read_run_config(path / "config.toml")
    there = dataclasses.replace(recorded.train, device="cuda:77", threads=6400)
    write_run_config(path / "config.toml", dataclasses.replace(recorded, train=there))
    with pytest.raises(ConfigError, match="threads = 6400, but this machine has"):
        resume(path, display=None)
    with pytest.raises(ConfigError, match="device 'cuda:77' cannot be used here"):
        resume(path, display=None, threads=1)
    assert resume(path, display=None, threads=1, device="cpu", max_steps=7).step == 7


LOADED = """
import sys
from pathlib import Path
from tapeless.config import ModelConfig
from tapeless.runner import train
shape = ModelConfig(vocab_size=256, hidden_dim=8, num_layers=1, num_heads=2, intermediate_dim=8, max_seq_len=8)
train(shape, corpus="markov", out_dir=sys.argv[1], max_steps=2, batch_size=1, eval_windows=1, sample_tokens=1, display=None,
      ops="reference", report_to="none", verify=sys.argv[2] == "verify")
print(*sorted(name for name in sys.modules if name.startswith("tapeless.")))
"""
FIRST_BATCH = {"", ".finding", ".first_batch", ".fixtures", ".full_size", ".model_judges", ".oracles", ".tolerances", ".twin"}


def test_training_loads_no_bench_and_of_verify_what_its_check_needs(tmp_path: Path):
    command = [sys.executable, "-c", LOADED, str(tmp_path / "run"), "verify"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert "tapeless.verify.first_batch" in loaded
    assert [name for name in loaded if name.startswith(("tapeless.bench", "tapeless.cli", "tapeless.tasks"))] == []
    assert {name.removeprefix("tapeless.verify") for name in loaded if name.startswith("tapeless.verify")} <= FIRST_BATCH


def test_a_disk_that_is_full_does_not_hide_the_exception_of_a_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            monkeypatch.setattr(checkpoint, "write_synced", full)
            raise ZeroDivisionError

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(WriteError, match="No space left") as raised:
        train(MODEL, text_file(tmp_path, 700), out_dir=tmp_path / "run", callbacks=[fail], display=None, **FEW)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("callbacks", [print, [None], "stop"])
def test_callbacks_are_checked_before_a_run_is_created(tmp_path: Path, callbacks: Any):
    with pytest.raises(ConfigError, match="expected a list of functions"):
        train(MODEL, text_file(tmp_path, 700), out_dir=tmp_path / "run", callbacks=callbacks, display=None, **FEW)
    assert not (tmp_path / "run").exists()


ENVIRONMENT = """
import os, sys, tapeless
before = dict(os.environ)
tapeless.train("tiny", out_dir=sys.argv[1], num_layers=1, corpus="markov", max_steps=1, callbacks=None, display=None)
assert before == dict(os.environ), set(os.environ) - set(before)
"""


def test_the_environment_is_left_as_it_was(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", ENVIRONMENT, str(tmp_path / "run")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_settings_of_the_model_too(tmp_path: Path):
    result = tapeless.train("tiny", out_dir=tmp_path / "run", display=None, num_layers=1, corpus="markov", max_steps=1)
    assert result.model.config.num_layers == 1
