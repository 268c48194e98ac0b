"""Model FLOPs utilization: the share of a GPU's bfloat16 peak that the model's own FLOPs (model/build.py) amount to.

Peaks are the makers' figures for dense matmuls without sparsity. A GPU that is not listed has no utilization, rather than a
wrong one.
Tested by: tests/bench/test_mfu.py."""

from tapeless.bench.task import Task
from tapeless.model.build import step_flops

PEAK = {"H100": 989e12, "H200": 989e12, "GH200": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}  # flop/s


def peak_of(gpu: str) -> float | None:
    """By a word of the device's name, such as NVIDIA H100 80GB HBM3. PCIe and NVL boards and slices (MIG) have less."""
    if any(word in gpu.lower() for word in ("pcie", "nvl", "mig")):
        return None
    return next((PEAK[word] for word in gpu.replace("-", " ").split() if word in PEAK), None)


def utilization(task: Task, seconds: float, gpu: str) -> float | None:
    peak = peak_of(gpu)
    return None if peak is None else step_flops(task.model, task.tokens, task.seq_len) / seconds / peak
