"""`--dtype auto`: bfloat16 if a matmul in it is at least a fifth faster than in float32 on this machine, else float32.

Tested by: tests/train/test_fastest.py."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

ON_CPU, ELSEWHERE = 512, 4096  # side of the matrices: the matmul must take much longer than its launch
REPEATS = 7
WORTH = 1.2


class Fastest(NamedTuple):
    dtype: str
    reason: str


def side(device: str) -> int:
    return ON_CPU if torch.device(device).type == "cpu" else ELSEWHERE


def synchronize(device: str) -> None:
    """Wait until the device has finished, so that a clock means something."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def clock(work: Callable[[], object], device: str) -> float:
    """Seconds of work on a device that had none before."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def matmul_seconds(dtype: torch.dtype, device: str) -> float:
    """The best of several, since other load can only add time."""
    x = torch.randn(side(device), side(device), device=device).to(dtype)
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        (x @ x)[0, 0].item()  # read back, to synchronise
        best = min(best, time.perf_counter() - start)
    return best


def fastest_dtype(device: str) -> Fastest:
    wide = matmul_seconds(torch.float32, device)
    try:
        narrow = matmul_seconds(torch.bfloat16, device)
    except (RuntimeError, TypeError):  # the device has no such dtype
        return Fastest("float32", f"{device} has no bfloat16 matmul")
    dtype = "bfloat16" if wide > WORTH * narrow else "float32"
    times = f"{1e3 * narrow:.2g} ms in bfloat16 and {1e3 * wide:.2g} in float32"
    return Fastest(dtype, f"a matmul of size {side(device)} takes {times}")
