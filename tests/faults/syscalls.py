"""Every call on files below a folder, as the C library makes it: listed, failed, cut short or killed. The process must have
been started with shim.c loaded (`environment`); children forked from it arm it for themselves.

points = list_points(folder, work)                 every call of work(), in a child
status = in_child(folder, work, Fault(point, …))   the same with one of them failing"""

import ctypes
import errno
import mmap
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from forked import Child

SOURCE = Path(__file__).with_name("shim.c")
OFF, LIST, FAIL, SHORT, KILL, TORN = range(6)  # as in shim.c
WRITES = ("write", "create", "fsync", "rename", "mkdir", "link", "truncate")
CHANGES = (*WRITES, "unlink", "rmdir", "chmod")
LIMIT = 60.0  # seconds after which a command hangs
HAPPENED = mmap.mmap(-1, 1)  # shared with forked processes: whether the call came that was to fail


class Point(NamedTuple):
    call: str
    name: str  # below the folder
    earlier: int  # equal calls before it

    def __str__(self) -> str:
        return f"{self.call} {self.name}" + (f" ({self.earlier + 1})" if self.earlier else "")


class Way(NamedTuple):
    """What may go wrong with a call."""

    action: int
    calls: tuple[str, ...]  # of these calls; none: of all
    number: int = 0  # errno
    lasting: bool = False  # every call after it that this disk refuses fails too

    def applies_to(self, point: Point) -> bool:
        return not self.calls or point.call in self.calls


WAYS = {
    "ENOSPC": Way(FAIL, WRITES, errno.ENOSPC),
    "EIO": Way(FAIL, (), errno.EIO),
    "EINTR": Way(FAIL, ("write", "read", "open", "create", "fsync"), errno.EINTR),
    "a short call": Way(SHORT, ("write", "read")),
    "kill -9": Way(KILL, ()),
    "kill -9 half-way": Way(TORN, ("write",)),
    "a full disk": Way(FAIL, WRITES, errno.ENOSPC, lasting=True),
    "EROFS": Way(FAIL, CHANGES, errno.EROFS),
    "a disk that is read-only from then on": Way(FAIL, CHANGES, errno.EROFS, lasting=True),
}


def compiled(folder: Path) -> Path | None:
    """The shim as a library; None without a C compiler, or where the linker has no LD_PRELOAD."""
    library = folder / "shim.so"
    command = ["cc", "-O2", "-fPIC", "-shared", "-o", str(library), str(SOURCE), "-ldl"]
    try:
        return library if sys.platform == "linux" and subprocess.run(command, check=False).returncode == 0 else None
    except FileNotFoundError:
        return None


def environment(library: Path) -> dict[str, str]:
    return os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}


def arm(folder: Path, way: Way, point: Point | None = None, *, listing: int = -1, every: float = 0.0) -> None:
    target = f"{point.call} {point.name}".encode(errors="surrogateescape") if point else b""
    earlier = ctypes.c_long(point.earlier if point else 0)
    library = ctypes.CDLL(None)
    numbers = way.action, way.number, int(way.lasting), ctypes.c_double(every)
    library.arm(os.fsencode(folder), listing, target, earlier, *numbers)


def list_points(folder: Path, work: Callable[[], int], output: Path) -> list[Point]:
    """Every call of the work on files below the folder. It has to succeed."""
    listing = folder.with_name(f"{folder.name}.points")

    def listed() -> int:
        descriptor = os.open(listing, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        arm(folder, Way(LIST, ()), listing=descriptor)
        return work()

    if status := Child(listed, output, output).wait():
        raise RuntimeError(f"exit status {status}: {output.read_text(errors='replace')}")
    earlier: Counter[str] = Counter()
    points = []
    for line in listing.read_text(errors="surrogateescape").splitlines():
        call, _, name = line.partition(" ")
        points.append(Point(call, name, earlier[line]))
        earlier[line] += 1
    return points


def in_child(folder: Path, work: Callable[[], int], output: Path, way: Way, point: Point) -> int | None:
    """Its exit status; None if it hangs."""

    def failing() -> int:
        arm(folder, way, point)
        try:
            return work()
        finally:
            HAPPENED[0] = fired_count() > 0

    HAPPENED[0] = way.action in (KILL, TORN)
    child = Child(failing, output, output)
    status = child.wait_for(LIMIT)
    if status is None:
        child.kill()
        child.wait()
    return status


def fired_count() -> int:
    """How many calls have failed in this process."""
    return int(ctypes.CDLL(None).fired_count())
