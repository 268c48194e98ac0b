"""What a process of ours does before it loads its libraries.

Tested by: tests/test_start.py."""

import gc

OBJECTS = 10_000  # made since the last look for cycles; Python's own number is 700


def raise_gc_threshold() -> None:
    """Loading torch and Numba makes hundreds of thousands of objects, all of which stay. To look through them for garbage again
    and again takes a sixth of the time that loading takes."""
    gc.set_threshold(OBJECTS)
