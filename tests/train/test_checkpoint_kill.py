"""A kill at any point inside saving or rotating. Before every call that changes the disk the folder is copied as it stands:
each copy is what a kill -9 at that moment leaves behind, and each must hold a whole checkpoint."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_fixtures import assert_is, save_at, silent, state_at, tensors_at

from tapeless.errors import CheckpointError
from tapeless.train.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from tapeless.train.rotation import remove_stale, rotate

CALLS = ["fsync", "rename", "replace", "mkdir", "rmdir", "unlink"]


def at_every_call(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    """act(n) before the n-th call of the operating system that makes or moves anything."""
    count = 0

    def watched(call: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*args: object, **options: object) -> object:
            nonlocal count
            count += 1
            act(count - 1)
            return call(*args, **options)

        return wrapper

    for name in CALLS:
        monkeypatch.setattr(os, name, watched(getattr(os, name)))


def killed_everywhere(folder: Path, work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What is on the disk before each call and after the last one."""
    copies: list[Path] = []

    def copy(n: int) -> None:
        with pytest.MonkeyPatch.context() as unwatched:
            for name in CALLS:
                unwatched.setattr(os, name, originals[name])
            shutil.copytree(folder, folder.with_name(f"killed-{n}"))
        copies.append(folder.with_name(f"killed-{n}"))

    originals = {name: getattr(os, name) for name in CALLS}
    with monkeypatch.context() as patch:
        at_every_call(patch, copy)
        work()
    copy(len(copies))
    return copies


def test_the_first_save_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    copies = killed_everywhere(folder, lambda: save_at(folder, 10), monkeypatch)
    whole = [copy for copy in copies if checkpoints(copy)]
    assert 0 < len(whole) < len(copies)
    for copy in whole:
        assert_is(load_checkpoint(copy, fallback=False, on_warning=silent), 10)


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


def test_the_checkpoint_before_stays_whole_through_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "checkpoints"
    save_at(folder, 10)
    copies = killed_everywhere(folder, lambda: save_at(folder, 20), monkeypatch)
    assert len(copies) >= 10
    steps = []
    for copy in copies:
        steps.append(load_checkpoint(copy, fallback=False, on_warning=silent).state["step"])
        assert_is(load_checkpoint(copy, fallback=False, on_warning=silent), steps[-1])
        remove_stale(copy)
        assert not list(copy.glob(".tmp-*"))
        assert_is(load_checkpoint(copy, fallback=False, on_warning=silent), steps[-1])
        save_at(copy, 20)
        assert_is(load_checkpoint(copy, fallback=False, on_warning=silent), 20)
    assert steps == sorted(steps)
    assert set(steps) == {10, 20}


def test_saving_a_step_again_leaves_one_of_the_two_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Even where it is the only checkpoint there is."""
    folder = tmp_path / "checkpoints"
    save_at(folder, 10)
    copies = killed_everywhere(
        folder, lambda: save_checkpoint(folder, *tensors_at(10), state_at(10, best_step=10)), monkeypatch
    )
    for copy in copies:
        found = load_checkpoint(copy, fallback=False, on_warning=silent)
        remove_stale(copy)
        tidied = load_checkpoint(copy, fallback=False, on_warning=silent)
        assert tidied.path.name == "step-00000010"
        assert tidied.state == found.state
        assert found.state["best_step"] in (3, 10)
        assert sorted(path.name for path in copy.iterdir()) == ["latest", "step-00000010"]


def test_a_kill_in_rotation_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "checkpoints"
    for step in (10, 20, 30, 40):
        save_at(folder, step)
    copies = killed_everywhere(folder, lambda: rotate(folder, keep_last=2, on_warning=silent), monkeypatch)
    assert len(copies) > 6
    for copy in copies:
        for step in checkpoints(copy):
            (copy / "latest").write_text(f"step-000000{step}\n")
            assert_is(load_checkpoint(copy, fallback=False, on_warning=silent), step)
        assert {30, 40} <= set(checkpoints(copy))


def test_a_full_disk_is_an_error_and_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The n-th call fails, for every n there is. (A folder that is to be made and is there already may fail unnoticed.)"""
    calls: list[int] = []
    with monkeypatch.context() as patch:
        at_every_call(patch, calls.append)
        save_at(tmp_path / "counted", 20)
    failures = []
    for n in calls:
        folder = tmp_path / str(n)
        save_at(folder, 10)

        def full(call: int, n: int = n) -> None:
            if call == n:
                raise OSError(errno.ENOSPC, "No space left on device")

        step = 20
        with monkeypatch.context() as patch:
            at_every_call(patch, full)
            try:
                save_at(folder, 20)
            except CheckpointError as error:
                failures.append(str(error))
                step = load_checkpoint(folder, fallback=False, on_warning=silent).state["step"]
        assert not list(folder.glob(".tmp-*-step-*"))
        assert_is(load_checkpoint(folder, fallback=False, on_warning=silent), step)
    assert len(failures) >= 10
    assert all("No space left on device" in failure for failure in failures)
