"""What a measurement was taken on, and how busy it was.
Tested by: tests/bench/test_machine.py."""

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.system(),
    }


def conditions(device: str, threads: int | None) -> dict[str, Any]:
    """Besides the machine, what a user can choose."""
    gpu = {"gpu": torch.cuda.get_device_name(device)} if torch.device(device).type == "cuda" else {}
    return {"device": device, "threads": threads or torch.get_num_threads(), **gpu}


class Others:
    """How much of all cores was taken by other processes than this one, since the watch began."""

    def __init__(self) -> None:
        self.start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:  # seconds: of all processes, of this one, on the clock
        return busy_seconds(), time.process_time(), time.perf_counter()

    def share(self) -> float:
        everyone, own, clock = (after - before for before, after in zip(self.start, self._now(), strict=True))
        return max(0.0, everyone - own) / (clock * (os.cpu_count() or 1))


def busy_seconds() -> float:
    """Of all cores, since the machine was started, with what a hypervisor gave to others; 0 where the system does not say."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _waiting, *interrupts, stolen = (int(ticks) for ticks in stat.read_text().split()[1:9])
    return (user + nice + system + sum(interrupts) + stolen) / os.sysconf("SC_CLK_TCK")
