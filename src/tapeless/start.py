"""Process settings made before torch is imported.

Tested by: tests/test_start.py."""

import gc

OBJECTS = 10_000  # allocations between collections; Python's default is 700


def raise_gc_threshold() -> None:
    """Importing torch and Numba allocates hundreds of thousands of long-lived objects; collecting among them at the default
    threshold takes a sixth of the import time."""
    gc.set_threshold(OBJECTS)
