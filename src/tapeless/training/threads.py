"""Whether all CPU threads are slower than one, because other processes use the cores.

Tested by: tests/train/test_threads.py."""

import os
from statistics import median

import torch

from tapeless.training.fastest import clock

SIDE = 256  # a matmul about as long as a small kernel: 1 ms on one thread
CALLS, ROUNDS = 10, 5
BUSY = 0.5  # of the cores in use by the average of the last minute: below, nothing is measured


def slower_threads(device: str) -> str | None:
    """A warning if that is so now. A step waits for its slowest thread, which another process may keep waiting."""
    threads, load = torch.get_num_threads(), load_average()
    if torch.device(device).type != "cpu" or threads < 2 or load < BUSY * (os.cpu_count() or 1):
        return None
    x = torch.ones(SIDE, SIDE)
    seconds: dict[int, list[float]] = {threads: [], 1: []}
    for count in [threads, 1] * ROUNDS:  # by turns: the load changes
        torch.set_num_threads(count)
        seconds[count].append(clock(lambda: [x @ x for _ in range(CALLS)], device))
    torch.set_num_threads(threads)
    together, alone = median(seconds[threads]), median(seconds[1])
    if together <= alone:
        return None
    return (
        f"other processes use the cores (load {load:.1f}): {threads} threads are {together / alone:.1f} times slower than one "
        "now; until they end, --threads 1 is faster"
    )


def load_average() -> float:
    """Of the last minute; 0 where the system has none."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return 0.0
