"""The directory of a run: made once, written to by one process at a time, and it says where it was made."""

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tapeless.data import locks
from tapeless.data.files import write_json
from tapeless.data.locks import RunLock
from tapeless.errors import ConfigError, LockedError
from tapeless.training.run_dir import RunDir, environment, git_commit


def test_a_new_run_has_its_folders(tmp_path: Path):
    run = RunDir.create(tmp_path / "runs" / "first")
    run.complete()
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "samples"]


def test_an_empty_directory_is_welcome_and_a_full_one_is_not(tmp_path: Path):
    RunDir.create(tmp_path).complete()
    with pytest.raises(ConfigError, match=f"is not empty.*tapeless train resume {tmp_path}"):
        RunDir.create(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="an open file cannot be removed")
def test_a_mark_that_cannot_be_removed_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The run is whole, and was reported as failed on a disk that had just become read-only."""
    run = RunDir.create(tmp_path / "run")
    run.config.write_text("")

    def refused(path: Path, *, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        run.complete()
    assert RunDir.open(run.path).path == run.path
    with pytest.raises(ConfigError, match="is not empty"):
        RunDir.create(run.path)


def test_a_file_in_the_way_is_an_error(tmp_path: Path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="cannot be created"):
        RunDir.create(tmp_path / "run")


def test_only_a_run_is_opened_as_one(tmp_path: Path):
    with pytest.raises(ConfigError, match="not the directory of a run"):
        RunDir.open(tmp_path)
    RunDir.create(tmp_path).config.write_text("")
    assert RunDir.open(tmp_path).checkpoints == tmp_path / "checkpoints"


def test_what_a_killed_process_left_is_made_again(tmp_path: Path):
    """It holds its claim while it lives."""
    making = RunDir.create(tmp_path / "run")
    (making.path / "train.bin").write_bytes(b"half")
    with pytest.raises(LockedError, match="is in use by process"):
        RunDir.create(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"is incomplete: .* repeat that command"):
        RunDir.open(tmp_path / "run")
    del making  # as the operating system does
    again = RunDir.create(tmp_path / "run")
    assert not (again.path / "train.bin").exists()
    again.config.write_text("")  # written last: from here on it is a run, even if the mark is still there
    del again
    with pytest.raises(ConfigError, match="is not empty"):
        RunDir.create(tmp_path / "run")
    assert RunDir.open(tmp_path / "run")


@pytest.mark.parametrize("when", ["waiting for the lock", "before the lock"])
def test_a_run_that_is_completed_meanwhile_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str):
    """Of two commands with one out_dir the second may find the mark, and get the lock once the first is done."""
    making = RunDir.create(tmp_path / "run")
    (making.path / "train.bin").write_bytes(b"whole")

    def completed(*_: object) -> None:
        making.config.write_text("")
        making.complete()

    if when == "waiting for the lock":
        monkeypatch.setattr(locks.time, "sleep", completed)
    else:
        monkeypatch.setattr(locks, "RunLock", lambda path: completed() or RunLock(path))
    with pytest.raises(ConfigError, match="is not empty"):
        RunDir.create(tmp_path / "run")
    assert (making.path / "train.bin").read_bytes() == b"whole"
    assert not (making.path / locks.UNFINISHED).exists()


def test_a_second_holder_is_told_who_the_first_is(tmp_path: Path):
    with RunLock(tmp_path / "lock"):
        with pytest.raises(LockedError, match=f"in use by process {os.getpid()} on {socket.gethostname()}") as refused:
            RunLock(tmp_path / "lock")
        assert refused.value.exit_status == 2
    with RunLock(tmp_path / "lock"):
        pass


def test_a_refusal_leaves_the_name_of_the_holder(tmp_path: Path):
    with RunLock(tmp_path / "lock"):
        for _ in range(2):
            with pytest.raises(LockedError, match=str(os.getpid())):
                RunLock(tmp_path / "lock")


def test_a_holder_without_a_name_yet_is_another_process(tmp_path: Path):
    with RunLock(tmp_path / "lock"):
        (tmp_path / "lock").write_text("")
        with pytest.raises(LockedError, match="in use by another process"):
            RunLock(tmp_path / "lock")


HOLD = """
import sys
from pathlib import Path
from tapeless.data.locks import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_another_process_is_named_and_when_it_is_killed_its_lock_is_free(tmp_path: Path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LockedError, match=f"process {holder.pid} on"):
            RunLock(tmp_path / "lock")
        holder.kill()
        holder.wait()
    assert json.loads((tmp_path / "lock").read_text())["pid"] == holder.pid
    with RunLock(tmp_path / "lock"):
        assert json.loads((tmp_path / "lock").read_text()) == {"pid": os.getpid(), "host": socket.gethostname()}


def test_a_disk_without_locks_is_not_taken_for_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def unsupported(_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("tapeless.data.locks._lock", unsupported)
    with pytest.raises(LockedError, match="cannot be locked: No locks available"):
        RunLock(tmp_path / "lock")


def test_the_environment_is_written_down(tmp_path: Path):
    write_json(tmp_path / "env.json", environment(["tapeless", "train", "new"]))
    written = json.loads((tmp_path / "env.json").read_text())
    assert written["argv"] == ["tapeless", "train", "new"]
    assert written["versions"]["torch"] == torch.__version__
    assert written["versions"]["safetensors"]
    assert written["threads"] == torch.get_num_threads()
    assert written["cpu"]


def test_the_commit_is_that_of_the_sources_alone(tmp_path: Path):
    assert git_commit(tmp_path) is None

    def git(*command: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "core.hooksPath=/dev/null"]
        run = ["git", "-C", str(tmp_path), *identity, *command]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()

    git("init")
    (tmp_path / "file.py").write_text("")
    git("add", "file.py")
    git("commit", "-m", "first")
    assert git_commit(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "installed.py").write_text("")
    assert git_commit(tmp_path / "site-packages") is None
