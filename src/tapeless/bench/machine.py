"""What a measurement was taken on, and how busy it was."""

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
    """Beside the machine, what may be another the next minute."""
    gpu = {"gpu": torch.cuda.get_device_name(device)} if torch.device(device).type == "cuda" else {}
    return {"device": device, "threads": threads or torch.get_num_threads(), "busy": busy_share(), **gpu}


def busy_share(seconds: float = 0.5) -> float:
    """How much of all cores is taken by others, looked at for a while; 0 where the system does not say."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0

    def counted() -> tuple[int, int]:  # ticks in all, and idle ones, waiting for a disk among them
        ticks = [int(word) for word in stat.read_text().splitlines()[0].split()[1:9]]
        return sum(ticks), ticks[3] + ticks[4]

    total, idle = counted()
    time.sleep(seconds)
    total_after, idle_after = counted()
    return 1 - (idle_after - idle) / max(1, total_after - total)
