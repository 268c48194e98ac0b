"""Every call that changes a folder, announced before it happens: there a process can be killed, or told that the disk is full.

with watched(folder, act):        act(point) before each; what it raises, the call raises
    …
A write is two points, before it and half-way through it, since the operating system may take a part and refuse the rest.
What is before a call is also after the one in front of it. Only Python's own calls are seen; the product makes no others.
A point is known by its call, its name and how often they came before: two threads write, in an order that varies."""

import builtins
import io
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

CALLS = ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "link", "symlink", "truncate", "chmod")
WRITABLE = set("wax+")


class Point(NamedTuple):
    call: str
    name: str  # of the file or folder, process ids left out
    earlier: int  # equal calls before it

    def __str__(self) -> str:
        return f"{self.call} {self.name}"


@contextmanager
def watched(folder: Path, act: Callable[[Point], None]) -> Iterator[None]:
    counts: Counter[tuple[str, str]] = Counter()
    counting = threading.Lock()

    def announce(call: str, path: str) -> None:
        if Path(path).is_relative_to(folder):
            known = call, plain_name(path, folder)
            with counting:
                point = Point(*known, counts[known])
                counts[known] += 1
            act(point)

    originals = {name: getattr(os, name) for name in CALLS} | {"open": builtins.open, "io.open": io.open}
    try:
        for name in CALLS:
            setattr(os, name, watched_call(name, originals[name], announce))
        builtins.open = io.open = watched_open(originals["open"], announce)
        yield
    finally:
        for name in CALLS:
            setattr(os, name, originals[name])
        builtins.open, io.open = originals["open"], originals["io.open"]


def in_writer_thread() -> bool:
    """Whether a checkpoint's writer makes the call that was announced."""
    return threading.current_thread().name.startswith("checkpoint-writer")


def plain_name(path: str, folder: Path) -> str:
    """Without what differs from process to process: `.tmp-1234-latest` is `.tmp-latest`."""
    name = str(Path(path).relative_to(folder))
    return name.replace(f".tmp-{os.getpid()}-", ".tmp-")


def watched_call(name: str, call: Callable[..., Any], announce: Callable[[str, str], None]) -> Callable[..., Any]:
    def wrapper(target: Any, *args: Any, **options: Any) -> Any:
        announce(name, path_of(target, options.get("dir_fd")))
        return call(target, *args, **options)

    return wrapper


def path_of(target: Any, folder: int | None) -> str:
    """The path of a name, of a name in an open folder, or of an open file."""
    if isinstance(target, int):
        return os.readlink(f"/proc/self/fd/{target}")
    return os.fspath(target) if folder is None else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), target)


def watched_open(original: Callable[..., Any], announce: Callable[[str, str], None]) -> Callable[..., Any]:
    def wrapper(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
        if isinstance(file, int) or not WRITABLE & set(mode):
            return original(file, mode, buffering, *args, **options)
        announce("open", os.fspath(file))
        raw = WatchedFile(file, mode.replace("b", "").replace("t", ""))
        raw.announce = announce
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **options)

    return wrapper


class WatchedFile(io.FileIO):
    announce: Callable[[str, str], None]
    half_done = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.announce("write the rest of" if self.half_done else "write", os.fspath(self.name))
        self.half_done = not self.half_done and len(view) > 1
        return super().write(view[: len(view) // 2] if self.half_done else view)

    def truncate(self, size: int | None = None) -> int:
        self.announce("truncate", os.fspath(self.name))
        return super().truncate(size)
