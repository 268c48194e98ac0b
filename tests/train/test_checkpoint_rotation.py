"""Rotation: what stays, what goes, and that nothing goes before its successor is known to be good."""

import errno
import math
from pathlib import Path

import pytest
from checkpoint_fixtures import assert_is, flip, save_at, silent
from run_fixtures import begin_run, config, play

from tapeless.errors import CheckpointError
from tapeless.training import checkpoint, rotation
from tapeless.training.checkpoint import checkpoints, load_checkpoint, point_to
from tapeless.training.rotation import is_new_best, remove_stale, rotate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in range(10, 90, 10):
        save_at(tmp_path, step)
    return tmp_path


def left(folder: Path) -> list[int]:
    assert not list(folder.glob(".tmp-*"))
    return list(checkpoints(folder))


def test_the_last_stay(folder: Path):
    deleted = rotate(folder, keep_last=3, on_warning=silent)
    assert left(folder) == [60, 70, 80]
    assert [path.name for path in deleted] == [f"step-000000{step}" for step in (10, 20, 30, 40, 50)]
    assert rotate(folder, keep_last=3, on_warning=silent) == []


def test_more_than_there_are_all_stay(folder: Path):
    assert rotate(folder, keep_last=100, on_warning=silent) == []


def test_every_nth_the_best_and_the_one_resumed_from_stay(folder: Path):
    point_to(folder, "best", folder / "step-00000020")
    rotate(folder, keep_last=1, keep_every=30, protect=50, on_warning=silent)
    assert left(folder) == [20, 30, 50, 60, 80]


def test_a_former_best_goes(folder: Path):
    assert is_new_best(1.0, None)
    point_to(folder, "best", folder / "step-00000020")
    assert is_new_best(0.9, 1.0)
    point_to(folder, "best", folder / "step-00000040")
    rotate(folder, keep_last=1, on_warning=silent)
    assert left(folder) == [40, 80]
    assert_is(load_checkpoint(folder, which="best", on_warning=silent), 40)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 1.0, 1.5])
def test_what_is_no_better_is_not_best(loss: float):
    assert not is_new_best(loss, 1.0)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_nan_is_not_even_the_first_best(folder: Path, loss: float):
    assert not is_new_best(loss, None)
    with pytest.raises(CheckpointError, match="no checkpoint is marked best"):
        load_checkpoint(folder, which="best", on_warning=silent)


def test_nothing_goes_before_its_successor_verifies(folder: Path):
    flip(100)(folder / "step-00000080" / "model.safetensors")
    warnings: list[str] = []
    assert rotate(folder, keep_last=1, on_warning=warnings.append) == []
    assert left(folder) == list(range(10, 90, 10))
    assert "model.safetensors" in warnings[0]
    assert "no older checkpoint is deleted" in warnings[0]


@pytest.mark.parametrize("pointer", ["latest", "best"])
def test_nothing_goes_while_a_name_cannot_be_read(folder: Path, pointer: str):
    (folder / pointer).write_text("?")
    warnings: list[str] = []
    assert rotate(folder, keep_last=1, on_warning=warnings.append) == []
    assert len(warnings) == 1


def test_nothing_goes_while_the_folder_cannot_be_listed(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The checkpoint was written; it was told as a failure of its writer, with a traceback."""

    def fails(folder: Path) -> dict[int, Path]:
        raise OSError(errno.EIO, "Input/output error")

    warnings: list[str] = []
    monkeypatch.setattr(rotation, "checkpoints", fails)
    assert rotate(folder, keep_last=1, on_warning=warnings.append) == []
    assert warnings == [f"{folder} cannot be listed: Input/output error; no older checkpoint is deleted"]


def test_after_going_back_the_abandoned_future_neither_counts_nor_goes(folder: Path):
    """Resumed from 30, since the later ones are damaged: 40 is written anew, the bad one kept under another name."""
    for step in range(40, 90, 10):
        flip(100)(folder / f"step-000000{step}" / "optim.safetensors")
    assert_is(load_checkpoint(folder, on_warning=lambda _: None), 30)
    save_at(folder, 40)
    rotate(folder, keep_last=2, protect=30, on_warning=silent)
    assert left(folder) == [30, 40, 50, 60, 70, 80]
    assert (folder / "step-00000040.damaged-1").is_dir()
    assert_is(load_checkpoint(folder, on_warning=lambda _: None), 40)


def test_what_killed_processes_left_is_cleared(folder: Path):
    (folder / ".tmp-1-step-00000090").mkdir()
    (folder / ".tmp-1-step-00000090" / "model.safetensors").write_bytes(b"half")
    (folder / ".tmp-1-latest").write_text("step-0")
    before = left_behind(folder)
    remove_stale(folder, on_warning=silent)
    assert left_behind(folder) == before - {".tmp-1-step-00000090", ".tmp-1-latest"}
    assert_is(load_checkpoint(folder, on_warning=silent), 80)


def left_behind(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_was_just_written_is_not_read_back_but_its_sizes_count(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Its hashes were taken while it was written; any other `latest` is hashed again."""
    hashed: list[str] = []
    monkeypatch.setattr(checkpoint, "file_sha256", lambda path: hashed.append(path.name) or "another")
    assert rotate(folder, keep_last=7, written=80, on_warning=pytest.fail) == [folder / "step-00000010"]
    assert hashed == []
    warnings: list[str] = []
    assert rotate(folder, keep_last=1, written=70, on_warning=warnings.append) == []
    assert hashed
    assert "no older checkpoint is deleted" in warnings[0]
    monkeypatch.undo()
    file = folder / "step-00000080" / "optim.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert rotate(folder, keep_last=1, written=80, on_warning=warnings.append) == []
    assert "optim.safetensors: expected" in warnings[-1]
    assert left(folder) == list(range(20, 90, 10))


def test_a_training_reads_no_checkpoint_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoint, "file_sha256", lambda path: pytest.fail(f"{path} is hashed again"))
    run = begin_run(tmp_path / "run", config(save_every=1, keep_last=1, eval_every=0))
    _, trainer = play(run)
    monkeypatch.undo()
    assert list(checkpoints(run.checkpoints)) == [trainer.best_step or 12]
    assert load_checkpoint(run.checkpoints, on_warning=pytest.fail).state["step"] == 12
