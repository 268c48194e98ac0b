"""A run directory that is renamed or removed while a process trains in it: the run follows it, or makes it again.

The directory and its files (config.toml, tokenizer, tokens …) are kept open, so a removed one is restored from what is still on
the disk; its checkpoints are not, except for the next one. If another run has its place by then, it is made beside that.
Before each checkpoint, and with every event but steps, its place is compared.
Tested by: tests/faults/test_moved.py."""

import os
import shutil
from pathlib import Path

from tapeless.data.files import atomic_write, unused
from tapeless.data.locks import UNFINISHED
from tapeless.training.run_dir import RunDir

MOST = 64  # files that are kept open; more are shards of tokens, and stay lost


class OpenRun:
    """Notices what happens to the directory of a run. Of no effect where directories cannot be opened (Windows)."""

    def __init__(self, run: RunDir):
        self.run = run
        self._folder: int | None = None
        self._made_again = ""  # the warning that says so, until all files are in it again
        self._files: dict[Path, int] = {}  # by path inside the run
        if os.name == "posix":
            self._folder = os.open(run.path, os.O_RDONLY)
            base = run.path / "base"
            files = [path for path in (*sorted(run.path.iterdir()), *sorted(base.rglob("*"))) if path.is_file()]
            kept = [path for path in files if path not in (run.lock, run.metrics)]
            self._files = {path.relative_to(run.path): os.open(path, os.O_RDONLY) for path in kept[:MOST]}

    def follow(self) -> str | None:
        """Point the run to where its directory is now, or make it again; returns a warning if it was not in its place. An
        OSError if it cannot be made: the next call tries again."""
        in_place = self._folder is None or _is_open(self.run.path, self._folder)
        if in_place and not self._made_again:
            return None
        if not in_place and self._folder is not None:
            before, now = self.run.path, _path_of(self._folder)
            if now is not None:
                self.run.move_to(now)  # everyone who holds the run writes there
                return f"{before} was renamed while the run was training: it goes on in {now}"
            if _is_a_run(self.run):
                self.run.move_to(unused(before))
            for folder in (self.run.path, self.run.checkpoints, self.run.samples):
                folder.mkdir(parents=True, exist_ok=True)
            removed, self._folder = self._folder, os.open(self.run.path, os.O_RDONLY)
            os.close(removed)
            where = "" if self.run.path == before else f" in {self.run.path}, since another run has its place"
            self._made_again = (
                f"{before} was removed while the run was training: it is made again{where}, with its configuration, data and "
                "metrics.jsonl; earlier checkpoints, samples and reports are lost"
            )
        self.copy_to(self.run.path)
        warning, self._made_again = self._made_again, ""
        return warning

    def copy_to(self, folder: Path) -> None:
        """The files that are kept open and are missing there, each as a whole or not at all."""
        for path, descriptor in self._files.items():
            if not (folder / path).exists():
                with open(descriptor, "rb", closefd=False) as source, atomic_write(folder / path) as target:
                    source.seek(0)
                    shutil.copyfileobj(source, target)

    def close(self) -> None:
        for descriptor in (*self._files.values(), *([] if self._folder is None else [self._folder])):
            os.close(descriptor)
        self._files, self._folder = {}, None


def _is_a_run(run: RunDir) -> bool:
    """Whether the place of a removed run has another one, or one that is being made."""
    return any(path.exists() for path in (run.config, run.lock, run.path / UNFINISHED))


def _is_open(path: Path, descriptor: int) -> bool:
    """Whether a path leads to what is open."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


def _path_of(descriptor: int) -> Path | None:
    """Where an open directory is now; None if it was removed, or the system does not tell."""
    try:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:
        return None
    return path if _is_open(path, descriptor) else None
