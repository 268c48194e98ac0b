"""What `--dtype auto` means on this machine: float32 or bfloat16, whichever multiplies faster, found by trying.

bfloat16 has to be a fifth faster to be worth its rounding. Where a device cannot multiply it at all, it is float32.
Tested by: tests/train/test_fastest.py."""

import time
from typing import NamedTuple

import torch

ON_CPU, ELSEWHERE = 512, 4096  # side of the matrices: a product must take much longer than asking for it
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


def product_seconds(dtype: torch.dtype, device: str) -> float:
    """The best of several, since whatever else runs only ever adds."""
    x = torch.randn(side(device), side(device), device=device).to(dtype)
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        (x @ x)[0, 0].item()  # read back, so that the device is done
        best = min(best, time.perf_counter() - start)
    return best


def fastest_dtype(device: str) -> Fastest:
    wide = product_seconds(torch.float32, device)
    try:
        narrow = product_seconds(torch.bfloat16, device)
    except (RuntimeError, TypeError):  # what torch raises of a dtype that a device has not
        return Fastest("float32", f"{device} cannot multiply bfloat16")
    dtype = "bfloat16" if wide > WORTH * narrow else "float32"
    return Fastest(
        dtype, f"a product of {side(device)} takes {1e3 * narrow:.2g} ms in bfloat16 and {1e3 * wide:.2g} in float32"
    )
