"""A kill at any point inside saving or rotating. Before every call that changes the disk the folder is copied as it stands:
each copy is what a kill -9 at that moment leaves behind, and each must hold a whole checkpoint."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_fixtures import assert_is, save_at, silent, state_at, tensors_at
from watched_disk import Point, watched

from tapeless.errors import WriteError
from tapeless.training.checkpoint import Checkpoint, checkpoints, load_checkpoint, save_checkpoint
from tapeless.training.rotation import remove_stale, rotate


def killed_everywhere(folder: Path, work: Callable[[], object]) -> list[Path]:
    """What is on the disk before each call and after the last one."""
    copies: list[Path] = []

    def copy(point: Point | None = None) -> None:
        copies.append(shutil.copytree(folder, folder.with_name(f"killed-{len(copies)}")))

    with watched(folder, copy):
        work()
    copy()
    return copies


def loaded(folder: Path) -> Checkpoint:
    """What a resume would go on from, whatever it has to say about newer ones."""
    return load_checkpoint(folder, fallback=False, on_warning=lambda text: None)


def test_the_first_save_is_there_whole_or_not_at_all(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    copies = killed_everywhere(folder, lambda: save_at(folder, 10))
    whole = [copy for copy in copies if checkpoints(copy)]
    assert 0 < len(whole) < len(copies)
    for copy in whole:
        assert_is(loaded(copy), 10)


def test_everything_is_on_the_disk_before_a_name_leads_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A power cut keeps what was synced, in no particular order the rest: files, then the manifest, then the folder, then the
    rename, then the folder above, then `latest`."""
    synced: list[int] = []  # inodes
    fsync, rename, replace = os.fsync, os.rename, os.replace
    done = []

    def record(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def check_folder(source: Path, target: Path) -> None:
        files = [(source / name).stat().st_ino for name in ("model.safetensors", "optim.safetensors", "state.json")]
        manifest = (source / "MANIFEST.json").stat().st_ino
        assert all(file in synced[: synced.index(manifest)] for file in files)
        assert source.stat().st_ino in synced[synced.index(manifest) :]
        synced.clear()
        rename(source, target)
        done.append("folder")

    def check_latest(source: Path, target: Path) -> None:
        if target.name == "latest":
            assert synced == [tmp_path.stat().st_ino, source.stat().st_ino]
            done.append("latest")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "rename", check_folder)
    monkeypatch.setattr(os, "replace", check_latest)
    save_at(tmp_path, 10)
    assert done == ["folder", "latest"]
    assert synced[-1] == tmp_path.stat().st_ino


def test_the_checkpoint_before_stays_whole_through_a_save(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    save_at(folder, 10)
    copies = killed_everywhere(folder, lambda: save_at(folder, 20))
    assert len(copies) >= 10
    steps = []
    for copy in copies:
        steps.append(loaded(copy).state["step"])
        assert_is(loaded(copy), steps[-1])
        remove_stale(copy, on_warning=silent)
        assert not list(copy.glob(".tmp-*"))
        assert_is(loaded(copy), steps[-1])
        save_at(copy, 20)
        assert_is(loaded(copy), 20)
    assert steps == sorted(steps)
    assert set(steps) == {10, 20}


def test_saving_a_step_again_leaves_one_of_the_two_at_any_moment(tmp_path: Path):
    """Even where it is the only checkpoint there is."""
    folder = tmp_path / "checkpoints"
    save_at(folder, 10)
    copies = killed_everywhere(folder, lambda: save_checkpoint(folder, *tensors_at(10), state_at(10, best_step=10)))
    for copy in copies:
        found = loaded(copy)
        remove_stale(copy, on_warning=silent)
        tidied = loaded(copy)
        assert tidied.path.name == "step-00000010"
        assert tidied.state == found.state
        assert found.state["best_step"] in (3, 10)
        assert sorted(path.name for path in copy.iterdir()) == ["latest", "step-00000010"]


def test_a_kill_in_rotation_leaves_no_half_checkpoint(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    for step in (10, 20, 30, 40):
        save_at(folder, step)
    copies = killed_everywhere(folder, lambda: rotate(folder, keep_last=2, on_warning=silent))
    assert len(copies) > 6
    for copy in copies:
        for step in checkpoints(copy):
            (copy / "latest").write_text(f"step-000000{step}\n")
            assert_is(loaded(copy), step)
        assert {30, 40} <= set(checkpoints(copy))


def test_a_full_disk_is_an_error_and_leaves_the_checkpoint_before(tmp_path: Path):
    """The n-th call fails, for every n there is. (A folder that is to be made and is there already may fail unnoticed.)"""
    points: list[Point] = []
    with watched(tmp_path / "counted", points.append):
        save_at(tmp_path / "counted", 20)
    failures = []
    for n, failing in enumerate(points):
        folder = tmp_path / str(n)
        save_at(folder, 10)

        def full(point: Point, failing: Point = failing) -> None:
            if point == failing:
                raise OSError(errno.ENOSPC, "No space left on device")

        step = 20
        with watched(folder, full):
            try:
                save_at(folder, 20)
            except WriteError as error:
                failures.append(str(error))
                step = loaded(folder).state["step"]
        assert not list(folder.glob(".tmp-*-step-*"))
        assert_is(loaded(folder), step)
    assert len(failures) >= 20
    assert all("No space left on device" in failure for failure in failures)
