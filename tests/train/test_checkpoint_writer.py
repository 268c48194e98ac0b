"""Checkpoints written in the background: the snapshot's values, one at a time, errors with their step, and no memory."""

import logging
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_fixtures import state_at
from run_fixtures import begin_run, config, events, final_bytes, play

from tapeless.data.files import file_sha256
from tapeless.errors import WriteError
from tapeless.training import checkpoint_writer as module
from tapeless.training.checkpoint import checkpoints, load_checkpoint, pointed, save_checkpoint
from tapeless.training.checkpoint_writer import CheckpointWriter, num_bytes, snapshot

FILES = ("model.safetensors", "optim.safetensors", "state.json", "MANIFEST.json")


def tensors(value: float) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    return {"w": torch.full((3, 5), value), "b": torch.full((4,), -value)}, {"exp_avg": {"w": torch.full((3, 5), 2 * value)}}


def writer(folder: Path, **options: Any) -> CheckpointWriter:
    return CheckpointWriter(folder, **({"keep_last": 2, "keep_every": 0, "before_write": lambda: None} | options))


class Held:
    """before_write that waits until it is told to continue."""

    def __init__(self) -> None:
        self.entered, self.released = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.released.wait(30)


def test_it_writes_the_values_of_the_moment_and_the_same_bytes(tmp_path: Path):
    held = Held()
    saved = writer(tmp_path / "background", before_write=held)
    params, optim = tensors(1.0)
    saved.save(params, optim, state_at(7), protect=None)
    assert held.entered.wait(30)
    for x in (*params.values(), *optim["exp_avg"].values()):
        x.fill_(9.0)  # training continues
    assert list(saved.outcomes()) == []
    held.released.set()
    (outcome,) = saved.outcomes(wait=True)
    assert (outcome.step, outcome.error, outcome.warnings) == (7, None, [])
    expected = save_checkpoint(tmp_path / "foreground", *tensors(1.0), state_at(7))
    assert outcome.path is not None
    assert [file_sha256(outcome.path / name) for name in FILES] == [file_sha256(expected / name) for name in FILES]
    saved.close()


def test_a_save_waits_for_the_one_before_and_none_is_dropped(tmp_path: Path):
    held = Held()
    saved = writer(tmp_path, before_write=held, keep_last=9)
    saved.save(*tensors(1.0), state_at(1), protect=None)
    assert held.entered.wait(30)
    threading.Timer(0.2, held.released.set).start()
    assert saved.wait() > 0.1
    for step in (2, 3):
        saved.save(*tensors(float(step)), state_at(step), protect=None)
        saved.mark_best(step)
    assert [outcome.step for outcome in saved.outcomes(wait=True)] == [1, 2, 2, 3, 3]
    assert list(checkpoints(tmp_path)) == [1, 2, 3]
    assert (pointed(tmp_path, "latest"), pointed(tmp_path, "best")) == (3, 3)
    assert load_checkpoint(tmp_path, on_warning=pytest.fail).params["w"][0, 0] == 3.0
    saved.close()


def test_an_error_names_its_step_and_the_next_save_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*args: Any) -> Path:
        raise WriteError(f"{tmp_path / 'step-00000004'} could not be written: No space left on device")

    saved = writer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(module, "save_checkpoint", fail)
        saved.save(*tensors(1.0), state_at(4), protect=None)
        saved.mark_best(4)
        failed, best = saved.outcomes(wait=True)
    assert (failed.step, failed.path, best.error) == (4, None, None)
    assert "step-00000004" in str(failed.error)
    saved.save(*tensors(1.0), state_at(5), protect=None)
    (outcome,) = saved.outcomes(wait=True)
    assert outcome.path == tmp_path / "step-00000005"
    assert pointed(tmp_path, "best") is None
    saved.close()


def test_an_unforeseen_error_of_the_thread_is_not_swallowed(tmp_path: Path):
    def broken() -> None:
        raise RuntimeError("broken")

    saved = writer(tmp_path, before_write=broken)
    saved.save(*tensors(1.0), state_at(1), protect=None)
    with pytest.raises(RuntimeError, match="broken"):
        list(saved.outcomes(wait=True))
    saved.close()


def test_without_memory_for_a_snapshot_training_waits_and_the_run_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    expected = begin_run(tmp_path / "a" / "run", config())
    play(expected)
    monkeypatch.setattr(module, "available_bytes", lambda device: 1000)
    caplog.set_level(logging.WARNING, "tapeless")
    run = begin_run(tmp_path / "b" / "run", config())
    play(run)
    said = [record.getMessage() for record in caplog.records if "no memory for a copy" in record.getMessage()]
    assert len(said) == 1
    assert "training waits while one is written" in said[0]
    assert final_bytes(run) == final_bytes(expected)


def test_a_copy_that_fails_is_no_memory(monkeypatch: pytest.MonkeyPatch):
    params, optim = tensors(1.0)
    given = {"params": params, **optim}
    assert num_bytes(given) == 4 * (15 + 4 + 15)
    taken = snapshot(given)
    assert taken is not None
    assert all(taken.tensors["params"][name].data_ptr() != x.data_ptr() for name, x in params.items())

    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(module, "_copy_to", fail)
    assert snapshot(given) is None


def test_a_slow_disk_is_warned_about_once_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def slow(*args: Any) -> Path:
        module.time.sleep(0.15)
        return save_checkpoint(*args)

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    expected = begin_run(tmp_path / "a" / "run", config(save_every=2, keep_last=20))
    play(expected)
    monkeypatch.setattr(module, "save_checkpoint", slow)
    run = begin_run(tmp_path / "b" / "run", config(save_every=2, keep_last=20))
    play(run)
    (told,) = events(run, ["guard"])
    assert re.fullmatch(r"step \d+: training waited 0\.\d s until the checkpoint before was written: .*", told["warning"])
    assert list(checkpoints(run.checkpoints)) == list(checkpoints(expected.checkpoints))
    assert final_bytes(run) == final_bytes(expected)
