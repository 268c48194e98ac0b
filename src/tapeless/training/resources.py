"""Memory in use and free memory, within the limits of this process's control groups, and free disk space.

    available = min(MemAvailable, limit - used of every control group above this process)
Page cache that a group can drop counts as free, as in MemAvailable. On other systems all memory counts as free.
Tested by: tests/train/test_resources.py, tests/train/test_process_memory.py."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

MEMINFO, GROUPS, MOUNT = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# version -> where its hierarchy is mounted, then its files: the limit, what is used, and the droppable part of memory.stat
LAYOUTS = {
    1: ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("", "memory.max", "memory.current", "inactive_file"),
}


def available_bytes(device: str) -> int:
    """Memory that could be allocated on a device."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_of_the_machine(), *_of_control_groups())


def free_disk(path: Path) -> int:
    """Free bytes where `path` is, or would be created."""
    return shutil.disk_usage(nearest_folder(path)).free


def nearest_folder(path: Path) -> Path:
    """The path, or its nearest existing parent."""
    folder = path.absolute()
    while not os.path.exists(folder):  # Path.exists raises for a name that is too long
        folder = folder.parent
    return folder


def _of_the_machine() -> int:
    if MEMINFO.exists():
        return next(int(line.split()[1]) * 1024 for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable"))
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # no such function, no such number
        return sys.maxsize


def _of_control_groups() -> Iterator[int]:
    """Free bytes of each group, from this process's own up to the root."""
    yield sys.maxsize
    if not GROUPS.exists():
        return
    for line in GROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            mounted, *files = LAYOUTS[2 if controllers == "" else 1]
            group = Path(path.lstrip("/"))
            for part in (group, *group.parents):  # in a container the path may be the host's: skip what does not exist
                yield _left(MOUNT / mounted / part, *files)


def _left(folder: Path, limit: str, used: str, droppable: str) -> int:
    try:
        most = (folder / limit).read_text().strip()
        if most == "max":
            return sys.maxsize
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, int(most) - int((folder / used).read_text()) + int(stat[droppable]))
    except (OSError, ValueError, KeyError):
        return sys.maxsize


def resident_bytes() -> int | None:
    """Resident memory of this process, or its peak if only that is known; None if neither is."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        if sys.platform == "win32":
            return None
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def device_bytes(device: torch.device) -> int | None:
    """GPU memory reserved by torch, including the pools of captured graphs; None on other devices."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else None


def format_bytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB" if size < 10e9 else f"{size / 1e9:,.1f} GB"
