"""How much memory a run has, as the operating system and the device's allocator count it.

Tested by: tests/train/test_process_memory.py."""

import os
import sys

import torch


def resident_bytes() -> int | None:
    """What this process has in memory; where only the largest so far is known, that; None where nothing is."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        if sys.platform == "win32":
            return None
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def device_bytes(device: torch.device) -> int | None:
    """What torch holds of a GPU, the pools of captured graphs included; None elsewhere."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else None


def bytes_words(size: int) -> str:
    return f"{size / 1e6:,.0f} MB" if size < 10e9 else f"{size / 1e9:,.1f} GB"
