"""Process settings of a command: made before anything is printed and torch is imported, and when it is done.

Tested by: tests/test_start.py."""

import gc
import io
import sys

OBJECTS = 10_000  # allocations between collections; Python's default is 700


def raise_gc_threshold() -> None:
    """Importing torch and Numba allocates hundreds of thousands of long-lived objects; collecting among them at the default
    threshold takes a sixth of the import time."""
    gc.set_threshold(OBJECTS)


def freeze_imports() -> None:
    """What imports allocated lives as long as the process: from here on no collection walks it, which takes time between two
    steps and after the last output of a command. Only where this process runs a command."""
    if gc.get_threshold()[0] == OBJECTS:
        gc.freeze()


def print_any_character() -> None:
    """Characters of a text that the encoding of the output lacks become `?` instead of an error. On Windows, where a pipe or
    file has an encoding that lacks most, they are written as UTF-8."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8" if sys.platform == "win32" else None, errors="replace")
