"""Where a step's time goes on a GPU: matmuls, attention, each of our own kernels with the bytes that it moves, and gaps.

Bytes are those of the tensors that a launch reads and writes, once each. A bandwidth is compared with that of a plain copy in
the same process.
Tested by: tests/bench/test_kernel_profile.py."""

import time
from collections import defaultdict
from statistics import median
from typing import Any, NamedTuple

import torch

from tapeless.bench.contenders import Ours
from tapeless.bench.task import Task
from tapeless.config import ModelConfig
from tapeless.estimate.dry_run import kernel_bytes
from tapeless.training.fastest import clock

PRODUCTS = ("nvjet", "gemm", "cutlass", "splitK")  # what the libraries call theirs
ATTENTION = ("sdpa", "cudnn", "flash", "attention")
COPIED = 2**30  # bytes
STEPS, TIMED = 3, 10  # under the profiler, and with a clock


class Spent(NamedTuple):
    calls: float  # a step
    seconds: float  # a step


def kind(kernel: str) -> str:
    """products, attention, or the kernel's own name where it is one of ours, else `other`."""
    if kernel.endswith("_kernel") and kernel.startswith("_"):
        return "attention" if "attention" in kernel else kernel
    lower = kernel.lower()
    if any(word.lower() in lower for word in PRODUCTS):
        return "products"
    return "attention" if any(word in lower for word in ATTENTION) else "other"


def copy_bandwidth(device: str) -> float:
    """Bytes a second, read and written together."""
    source = torch.empty(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED / min(clock(lambda: target.copy_(source), device) for _ in range(TIMED))


def spent_by_kind(step: Any) -> dict[str, Spent]:
    """One unit of work, kernel by kernel, under torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    calls: dict[str, float] = defaultdict(float)
    seconds: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        calls[kind(event.key)] += event.count / STEPS
        seconds[kind(event.key)] += event.self_device_time_total / 1e6 / STEPS
    return {name: Spent(calls[name], seconds[name]) for name in seconds if seconds[name] > 0}


def kernel_profile(task: Task) -> dict[str, Any]:
    assert isinstance(task.model, ModelConfig)
    bandwidth = copy_bandwidth(task.train.device)
    ours, clock = Ours(task), []
    for step in range(3 + TIMED):
        ours.prepare(step)
        torch.cuda.synchronize()
        start = time.perf_counter()
        ours.step()
        clock.append(time.perf_counter() - start)
    spent = spent_by_kind(ours.step)
    moved = kernel_bytes(task.model, task.train)
    step_s = median(clock[3:])
    return {
        "dtype": task.train.dtype,
        "step_s": step_s,
        "gaps_s": max(0.0, step_s - sum(each.seconds for each in spent.values())),
        "copy_bytes_per_s": bandwidth,
        "kernels": {
            name: {
                "calls": each.calls,
                "seconds": each.seconds,
                "bytes": moved.get(name),
                "of_copy": moved[name] / each.seconds / bandwidth if name in moved else None,
            }
            for name, each in sorted(spent.items(), key=lambda item: -item[1].seconds)
        },
    }
