"""Memory in use, as the operating system and the device's allocator count it.

Tested by: tests/train/test_process_memory.py."""

import os
import sys

import torch


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
