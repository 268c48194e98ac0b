"""Process settings of a command: made before anything is printed and torch is imported, and when it is done.

Tested by: tests/test_start.py."""

import gc
import io
import os
import sys

OBJECTS = 10_000  # allocations between collections; Python's default is 700
RESTARTS, MOST_RESTARTS = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"  # as torchrun names them
LAUNCHER = "TAPELESS_LAUNCHER"  # the process id of `--ranks`


def raise_gc_threshold() -> None:
    """Importing torch and Numba allocates hundreds of thousands of long-lived objects; collecting among them at the default
    threshold takes a sixth of the import time."""
    gc.set_threshold(OBJECTS)


def freeze_imports() -> None:
    """What imports allocated lives as long as the process: from here on no collection walks it, which takes time between two
    steps and after the last output of a command. Only where this process runs a command."""
    if gc.get_threshold()[0] == OBJECTS:
        gc.freeze()


def num_ranks() -> int:
    """How many processes train together: torchrun and `--ranks` tell each, with its own number. A cluster that sets WORLD_SIZE
    alone has started no ranks."""
    return max(1, _number("WORLD_SIZE")) if "RANK" in os.environ else 1


def own_rank() -> int:
    """This process's number among them; the first one, 0, prints and writes."""
    return _number("RANK") if num_ranks() > 1 else 0


def restarted() -> bool:
    """Whether torchrun or `--ranks` has started the same command again, after a rank had ended."""
    return _number(RESTARTS) > 0


def may_restart() -> bool:
    """Whether torchrun would."""
    return _number(MOST_RESTARTS) > 0


def _number(name: str) -> int:
    """Of a variable of the environment; 0 if it is none."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else 0


def silence() -> None:
    """stdout of the other ranks: whatever a library prints there."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def print_any_character() -> None:
    """Characters of a text that the encoding of the output lacks become `?` instead of an error. On Windows, where a pipe or
    file has an encoding that lacks most, they are written as UTF-8."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8" if sys.platform == "win32" else None, errors="replace")
