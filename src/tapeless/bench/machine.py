"""What a measurement was taken on, and how busy it was."""

import os
import platform
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
    return {"device": device, "threads": threads or torch.get_num_threads(), "load_average": os.getloadavg()[0], **gpu}
