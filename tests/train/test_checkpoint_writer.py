"""Checkpoints written in the background: the snapshot's values, one at a time, errors and bugs with their step, no memory."""

import logging
import re
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_fixtures import state_at
from run_fixtures import MODEL, begin_run, config, dataset, events, final_bytes, play

from tapeless.data.files import file_sha256
from tapeless.errors import WriteError
from tapeless.model.build import build_model
from tapeless.training import checkpoint_writer as module
from tapeless.training.checkpoint import checkpoints, load_checkpoint, pointed, save_checkpoint
from tapeless.training.checkpoint_writer import CheckpointWriter, num_bytes, snapshot
from tapeless.training.run_dir import RunDir
from tapeless.training.trainer import Trainer

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


def fail_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The first call of a function that the writer thread calls raises what nobody expects of it."""
    original, failed = getattr(module, name), []

    def broken(*args: Any, **options: Any) -> Any:
        if not failed:
            failed.append(name)
            raise RuntimeError(f"{name} is broken")
        return original(*args, **options)

    monkeypatch.setattr(module, name, broken)


@pytest.mark.parametrize("name", ["save_checkpoint", "rotate", "point_to"])
def test_a_bug_in_the_thread_is_reported_with_its_step_and_does_not_end_the_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    expected = begin_run(tmp_path / "a" / "run", config())
    play(expected)
    fail_once(monkeypatch, name)
    run = begin_run(tmp_path / "b" / "run", config())
    play(run)
    (told,) = events(run, ["guard"])
    text = f"step 3: the checkpoint writer failed: RuntimeError('{name} is broken')"  # the first best
    assert told["warning"] == f"{text}; training continues"
    (record,) = [record for record in caplog.records if record.getMessage() == text]
    assert record.exc_info is not None  # with its traceback
    assert final_bytes(run) == final_bytes(expected)


def test_a_bug_that_lasts_ends_the_run_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*args: Any) -> Path:
        raise RuntimeError("broken for good")

    monkeypatch.setattr(module, "save_checkpoint", broken)
    run = begin_run(tmp_path / "run", config())
    with pytest.raises(RuntimeError, match="broken for good"):
        play(run)
    assert [event["step"] for event in events(run, ["step"])] == list(range(1, 13))


def test_best_never_names_a_checkpoint_that_was_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not even if there is another one of that step, as after a resume from an older one."""
    saved = writer(tmp_path)
    saved.save(*tensors(1.0), state_at(4), protect=None)
    saved.wait()
    fail_once(monkeypatch, "save_checkpoint")
    saved.save(*tensors(2.0), state_at(4), protect=None)
    saved.mark_best(4)
    saved.wait()
    assert pointed(tmp_path, "best") is None
    saved.save(*tensors(2.0), state_at(4), protect=None)
    saved.mark_best(4)
    saved.wait()
    assert pointed(tmp_path, "best") == 4
    saved.close()


def test_the_copy_is_freed_before_the_next_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Otherwise two might exist at a time; also after a failure, whose traceback references the frames."""
    copies: list[weakref.ref[torch.Tensor]] = []

    def remembered(tensors: Any) -> Any:
        taken = snapshot(tensors)
        assert taken is not None
        copies.extend(weakref.ref(x) for views in taken.tensors.values() for x in views.values())
        return taken

    monkeypatch.setattr(module, "snapshot", remembered)
    saved = writer(tmp_path)
    for step in (1, 2):
        saved.save(*tensors(1.0), state_at(step), protect=None)
        saved.wait()
        assert len(copies) == 3 * step
        assert [copy() for copy in copies] == [None] * len(copies)
        fail_once(monkeypatch, "rotate")
    saved.close()


def test_an_error_in_the_loop_waits_for_the_checkpoint_that_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also if the next line of the log fails: the thread never outlives the run's lock."""
    held, threads = Held(), set(threading.enumerate())

    def slow(*args: Any) -> Path:
        held()
        return save_checkpoint(*args)

    def disturb(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 5:
            assert held.entered.wait(30)
            threading.Timer(0.2, held.released.set).start()
        if event["step"] == 5 or event["event"] == "checkpoint":
            raise KeyboardInterrupt(event["event"])

    monkeypatch.setattr(module, "save_checkpoint", slow)
    run = begin_run(tmp_path / "run", config(eval_every=0))
    with pytest.raises(KeyboardInterrupt, match="checkpoint"):
        play(run, on_event=disturb)
    assert load_checkpoint(run.checkpoints, on_warning=pytest.fail).state["step"] == 4
    assert not [thread for thread in {*threading.enumerate()} - threads if thread.name.startswith("checkpoint-writer")]


def test_time_spent_counts_the_copy_and_the_waiting_but_not_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """While the checkpoint of step 5 is being written, steps 6 to 8 are made."""
    clock, held = [0.0], Held()

    def slowed(owner: Any, name: str, seconds: float) -> None:
        function = getattr(owner, name)

        def slow(*args: Any, **options: Any) -> Any:
            clock[0] += seconds
            return function(*args, **options)

        monkeypatch.setattr(owner, name, slow)

    def release(event: dict[str, Any]) -> None:
        told.append(event)
        if event["event"] == "step" and event["step"] == 8:
            assert held.entered.wait(30)
            held.released.set()

    told: list[dict[str, Any]] = []
    monkeypatch.setattr("tapeless.training.trainer.time.perf_counter", lambda: clock[0])
    slowed(Trainer, "_computed", 1.0)
    slowed(module, "snapshot", 10.0)
    slowed(CheckpointWriter, "wait", 0.125)
    settings = config(save_every=5, eval_every=9, sample_every=0)
    run, data = RunDir.create(tmp_path / "run"), dataset(tmp_path)
    Trainer(build_model(MODEL), settings, data, run=run, on_event=release, before_save=held).run()
    first, *_, last = [event["seconds"] for event in told if event["event"] == "time_spent"]
    assert {name: spent for name, spent in first.items() if spent} == {"step": 9.0, "checkpoints": 20.5}  # of steps 5 and 9
    # Steps 5, 9, 10 and 12: each waits twice, before the copy and as the copy is made; the last also until it is written.
    assert {name: spent for name, spent in last.items() if spent} == {"step": 12.0, "checkpoints": 4 * 10.25 + 0.25}


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


NO_MEMORY = (torch.OutOfMemoryError(), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"))


@pytest.mark.parametrize("error", NO_MEMORY, ids=[type(error).__name__ for error in NO_MEMORY])
def test_a_copy_that_fails_is_no_memory(error: Exception, monkeypatch: pytest.MonkeyPatch):
    params, optim = tensors(1.0)
    given = {"params": params, **optim}
    assert num_bytes(given) == 4 * (15 + 4 + 15)
    taken = snapshot(given)
    assert taken is not None
    assert all(taken.tensors["params"][name].data_ptr() != x.data_ptr() for name, x in params.items())

    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(module, "_copy_to", fail)
    assert snapshot(given) is None


def test_a_slow_disk_is_warned_about_once_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def slow(*args: Any) -> Path:
        module.time.sleep(0.3)
        return save_checkpoint(*args)

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    expected = begin_run(tmp_path / "a" / "run", config(save_every=2, keep_last=20))
    play(expected)
    monkeypatch.setattr(module, "save_checkpoint", slow)
    run = begin_run(tmp_path / "b" / "run", config(save_every=2, keep_last=20))
    play(run)
    (told,) = events(run, ["guard"])
    assert re.fullmatch(r"step \d+: training has waited 1\.\d s for the checkpoint before to be written: .*", told["warning"])
    assert list(checkpoints(run.checkpoints)) == list(checkpoints(expected.checkpoints))
    assert final_bytes(run) == final_bytes(expected)
