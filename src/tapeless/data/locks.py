"""Locks: of a run that a process writes to, and of a folder that is being made.

Tested by: tests/train/test_run_dir.py."""

import json
import os
import shutil
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from tapeless.data.files import writing
from tapeless.errors import RUN_LOCKED, LockedError

UNFINISHED = ".unfinished"
LOCKED_BYTE = 1 << 20  # Windows makes locked bytes unreadable: lock one beyond the text


class RunLock:
    """Held while a process writes to a run. The operating system releases it when the process ends for any reason, so a stale
    lock is impossible; pid and host in the file are only for the error message."""

    def __init__(self, path: Path):
        self.path = path
        with writing(path):
            self._file: IO[bytes] = open(path, "a+b", buffering=0)  # noqa: SIM115  held for the life of the run
        try:
            _take(self._file)
        except OSError as error:
            self._file.seek(0)
            holder = self._file.read().decode(errors="replace")
            self._file.close()
            if not isinstance(error, BlockingIOError | PermissionError):  # the errors of Unix and Windows for a held lock
                raise LockedError(f"{path} cannot be locked: {error.strerror}; choose an out_dir on another disk") from None
            raise RUN_LOCKED(path=path.parent, holder=_who(holder)) from None
        with suppress(OSError):  # a full disk: the lock is held anyway
            self._file.truncate(0)
            self._file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())

    def in_place(self) -> bool:
        """Whether the locked file is still the one of this name."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except OSError:
            return False

    def release(self) -> None:
        """The file stays: another process may have just opened it."""
        if not self._file.closed:
            with suppress(OSError):
                self._file.truncate(0)
            self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # what is to be locked was opened
            self.release()

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def claim(folder: Path, last: str) -> RunLock | None:
    """Before a folder is filled: hold it by a file in it, which marks it as unfinished. What a killed process has left there is
    removed. None if the folder holds anything else, such as `last`, which is written last."""
    held = [entry for entry in folder.iterdir() if entry.name != UNFINISHED]
    if held and (not (folder / UNFINISHED).exists() or (folder / last).exists()):
        return None
    lock = RunLock(folder / UNFINISHED)
    if not lock.in_place():  # whoever held it until now has finished, or given up
        lock.release()
        return claim(folder, last)
    if (folder / last).exists():  # likewise, before the lock made its file again
        finish(lock)
        return None
    for entry in held:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    return lock


def finish(claimed: RunLock) -> None:
    with suppress(OSError):  # beside what is written last the mark means nothing
        claimed.path.unlink(missing_ok=True)
    claimed.release()


def _take(file: IO[bytes]) -> None:
    """Lock, or fail at the third attempt: holder() takes the lock for a moment."""
    for _ in range(2):
        try:
            return _lock(file)
        except (BlockingIOError, PermissionError):
            time.sleep(0.05)
    _lock(file)


def holder(path: Path) -> str | None:
    """Who holds a run's lock; None if no process does."""
    try:
        with open(path, "rb", buffering=0) as file:
            try:
                _lock(file)
            except (BlockingIOError, PermissionError):
                return _who(file.read().decode(errors="replace"))
    except OSError:
        pass  # a run that never started, or a file system without locks
    return None


if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[bytes]) -> None:
        os.lseek(file.fileno(), LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _who(holder: str) -> str:
    try:
        known = json.loads(holder)
        return f"process {known['pid']} on {known['host']}"
    except (ValueError, LookupError, TypeError):
        return "another process"  # it has the lock but has not written its pid yet
