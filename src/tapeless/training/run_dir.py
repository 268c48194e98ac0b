"""The directory of a run: its paths, its lock, and the environment it was created in.

    config.toml (run_config.py)   env.json   metrics.jsonl (metrics_log.py)   checkpoints/ (checkpoint.py)   lock
Tested by: tests/train/test_run_dir.py."""

import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import torch

from tapeless.data.files import is_pickle, writing
from tapeless.errors import NOT_A_RUN, PICKLE, RUN_LOCKED, RUN_NOT_EMPTY, ConfigError, LockedError

PACKAGES = ("tapeless", "torch", "numpy", "safetensors")
LOCKED_BYTE = 1 << 20  # Windows makes locked bytes unreadable: lock one beyond the text


def resume_command(run: Path, functions: Iterable[str] = (), **changes: object) -> str:
    """How a run is continued: the command, or the call if it needs functions of the caller, by their arguments' names."""
    if functions := list(functions):
        arguments = [f"{name}=..." for name in functions] + [f"{name}={value}" for name, value in changes.items()]
        return f"tapeless.resume({str(run)!r}, {', '.join(arguments)})"
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in changes.items()]
    return " ".join([f"tapeless train resume {shlex.quote(str(run))}", *flags])


class RunDir:
    """The paths of a run, by name."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config, self.env, self.metrics = (self.path / name for name in ("config.toml", "env.json", "metrics.jsonl"))
        self.report, self.tokenizer = self.path / "report.html", self.path / "tokenizer.json"
        self.checkpoints, self.samples, self.lock = (self.path / name for name in ("checkpoints", "samples", "lock"))

    @classmethod
    def create(cls, path: str | Path) -> "RunDir":
        """A new run directory, which must be empty."""
        run = cls(path)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            taken = next(run.path.iterdir(), None)
            if taken is None:
                run.checkpoints.mkdir()
                run.samples.mkdir()
        except OSError as error:
            raise ConfigError(f"out_dir {run.path} cannot be created: {error.strerror}") from None
        if taken is not None:
            raise RUN_NOT_EMPTY(path=run.path, holds=taken.name)
        return run

    @classmethod
    def open(cls, path: str | Path) -> "RunDir":
        """The directory of an existing run."""
        run = cls(path)
        if not run.config.is_file():
            if run.path.is_file() and _is_pickle(run.path):
                raise PICKLE(path=run.path, expected="the directory of a run, whose weights are safetensors")
            raise NOT_A_RUN(path=run.path, such=_run_like(run.path))
        return run


def _run_like(path: Path) -> Path:
    """The run that a path was meant for: of the same name in runs/, or the newest there or below the path."""
    runs = [config.parent for folder in (path, Path("runs")) for config in sorted(folder.glob("*/config.toml"))]
    named = [run for run in runs if run.name == path.name]
    return (named or sorted(runs, key=lambda run: run.stat().st_mtime, reverse=True) or [Path("runs/tiny")])[0]


def _is_pickle(path: Path) -> bool:
    with open(path, "rb") as file:
        return is_pickle(file.read(512))


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

    def release(self) -> None:
        """The file stays: another process may have just opened it."""
        if not self._file.closed:
            with suppress(OSError):
                self._file.truncate(0)
            self._file.close()

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


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


def environment(argv: Sequence[str]) -> dict[str, Any]:
    """Versions and hardware, on which a run's results may depend besides its configuration."""
    return {
        "argv": list(argv),
        "versions": {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "git_commit": git_commit(Path(__file__).parent),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def git_commit(folder: Path) -> str | None:
    """The commit of the sources in `folder`; None for an installed copy, or without git."""
    try:
        # A virtual environment is often inside another repository, which does not track it.
        for command in (["ls-files", "--error-unmatch", "."], ["rev-parse", "HEAD"]):
            done = subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None  # run from the sources, not installed


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()
