"""Where the seconds before the first step go: phases of a start, each from the end of the one before.

    phases = Phases(process_age())
    import torch
    phases.end("imports")
    phases.seconds                     # {"imports": 0.7}
Tested by: tests/train/test_phases.py."""

import os
import time
from pathlib import Path

STAT, UPTIME = Path("/proc/self/stat"), Path("/proc/uptime")
STARTED = 19  # the field of STAT behind the name of the program: when the process began, in ticks since the machine did


class Phases:
    def __init__(self, age: float = 0.0):
        """age: seconds that the first phase has lasted already."""
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter() - age

    def end(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now


def process_age() -> float:
    """Seconds since this process began, to a hundredth; without /proc, the processor time it has used."""
    try:
        began = int(STAT.read_text().rpartition(")")[2].split()[STARTED]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, float(UPTIME.read_text().split()[0]) - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return time.process_time()
