"""What differs between devices when time and memory are measured: waiting for the device, and reading a high-water mark."""

from pathlib import Path

import torch

from tapeless.training.resources import resident_bytes

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def is_cuda(device: str) -> bool:
    return torch.device(device).type == "cuda"


def used_bytes(device: str) -> int:
    """Held now: by tensors on a GPU, by the process on a CPU."""
    if is_cuda(device):
        return torch.cuda.memory_allocated(device)
    return _status("VmRSS") or resident_bytes() or 0


def reset_peak(device: str) -> None:
    """Restart what `peak_bytes` measures. If the system cannot do that, it measures from the start of the process."""
    if is_cuda(device):
        torch.cuda.empty_cache()  # of what compiling left
        torch.cuda.reset_peak_memory_stats(device)
    elif CLEAR.exists():
        CLEAR.write_text("5")


def peak_bytes(device: str) -> int:
    if is_cuda(device):
        return torch.cuda.max_memory_allocated(device) + _idle_in_graphs(device)
    return _status("VmHWM") or resident_bytes() or 0


def reserved_bytes(device: str) -> int | None:
    """The most that torch took from a GPU, with the gaps between its tensors: what decides whether a model fits."""
    return torch.cuda.max_memory_reserved(device) if is_cuda(device) else None


def _idle_in_graphs(device: str) -> int:
    """What captured graphs hold for their next replay: memory of tensors inside the graph, which nothing else can use."""
    asked = torch.device(device).index
    index = torch.cuda.current_device() if asked is None else asked
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment["segment_pool_id"]) != (0, 0)
    )


def _status(field: str) -> int:
    """Bytes; 0 if the system does not report them."""
    if not STATUS.exists():
        return 0
    return next(int(line.split()[1]) * 1024 for line in STATUS.read_text().splitlines() if line.startswith(field))
