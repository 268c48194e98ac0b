"""The directory of a run: its paths, its lock, and the environment it was created in.

    config.toml (run_config.py)   env.json   metrics.jsonl (metrics_log.py)   checkpoints/ (checkpoint.py)   lock
Tested by: tests/train/test_run_dir.py."""

import os
import platform
import shlex
import socket
import subprocess
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tapeless.data.files import is_pickle
from tapeless.data.locks import UNFINISHED, RunLock, claim, finish
from tapeless.errors import NOT_A_RUN, PICKLE, RUN_NOT_EMPTY, ConfigError, WriteError

PACKAGES = ("tapeless", "torch", "numpy", "safetensors")


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
        self.move_to(Path(path))

    def move_to(self, path: Path) -> None:
        """For whoever renamed the directory."""
        self.path = path
        self.config, self.env, self.metrics = (self.path / name for name in ("config.toml", "env.json", "metrics.jsonl"))
        self.report, self.tokenizer = self.path / "report.html", self.path / "tokenizer.json"
        self.checkpoints, self.samples, self.lock = (self.path / name for name in ("checkpoints", "samples", "lock"))
        self.elsewhere: Path | None = None  # where the last checkpoint is, if there was no room here
        self._claim: RunLock | None = None

    @classmethod
    def create(cls, path: str | Path) -> "RunDir":
        """A new run directory, which must be empty."""
        run = cls(path)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            run._claim = claim(run.path, run.config.name)
            if run._claim is not None:
                run.checkpoints.mkdir()
                run.samples.mkdir()
        except WriteError:
            raise
        except OSError as error:
            raise ConfigError(f"out_dir {run.path} cannot be created: {error.strerror}") from None
        if run._claim is None:
            raise RUN_NOT_EMPTY(path=run.path, holds=next(run.path.iterdir()).name)
        return run

    def complete(self) -> None:
        """A new run has everything that a resume needs."""
        if self._claim is not None:
            finish(self._claim)

    @classmethod
    def open(cls, path: str | Path) -> "RunDir":
        """The directory of an existing run."""
        run = cls(path)
        if not run.config.is_file():
            if (run.path / UNFINISHED).exists():
                raise ConfigError(
                    f"{path} is incomplete: the command that makes it is running, or was cut off; repeat that command"
                )
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


def environment(argv: Sequence[str]) -> dict[str, Any]:
    """Versions and hardware, on which a run's results may depend besides its configuration."""
    return {
        "argv": list(argv),
        "versions": {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "git_commit": git_commit(Path(__file__).parent),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpu": cpu_name(),
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


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()
