"""What all kernels of this folder share: how they are launched, and the sum of the programs' partial sums.

A launch goes to the current device, which may differ from the tensors': `on_device` makes theirs current. In the interpreter
(TRITON_INTERPRET=1) the same kernels run on the CPU, slowly, so that they can be tested without a GPU. On the meta device
nothing is launched: the launchers only allocate (kernels/dry.py), and `count_kernel_bytes` counts what kernels would move.
Tested by: tests/kernels/triton/test_launch.py."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapeless.kernels.private_api import distinct_bytes

Result = TypeVar("Result")
_counted: list[dict[str, int]] = []  # of the count_kernel_bytes that are active


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, inplace: Collection[Tensor] = (), moved: int | None = None, **options: Any
) -> None:
    """kernel[grid](*args, **options); the first argument is a tensor. Each distinct tensor counts as moved once, those in
    `inplace` twice; `moved` gives the bytes of a kernel that does not pass over its tensors as a whole."""
    if not args[0].is_meta:
        kernel[grid](*args, **options)
        return
    if moved is None:
        moved = distinct_bytes(args) + distinct_bytes(inplace)
    for counts in _counted:
        counts[kernel.fn.__name__] += moved


@contextmanager
def count_kernel_bytes() -> Iterator[dict[str, int]]:
    """Kernel -> bytes that it reads and writes, while a model runs on the meta device."""
    counts: dict[str, int] = defaultdict(int)
    _counted.append(counts)
    try:
        yield counts
    finally:
        _counted.remove(counts)


def on_device(launcher: Callable[..., Result]) -> Callable[..., Result]:
    """The launcher, with the device of its first tensor as the current one."""

    @wraps(launcher)
    def run(*args: object, **options: object) -> Result:
        device = next(x.device for x in args if isinstance(x, Tensor))
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return launcher(*args, **options)
        with torch.cuda.device(device):
            return launcher(*args, **options)

    return run


def contiguous(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


def unit_stride(x: Tensor) -> Tensor:
    """Adjacent features; the other strides are free."""
    return x if x.stride(-1) == 1 else x.contiguous()


def warps(elements: int) -> int:
    """Each thread holds about sixteen elements of a program's tile: two loads of sixteen bytes in bfloat16."""
    return max(1, min(16, triton.next_power_of_2(elements) // 512))


@triton.jit
def tanh(x):
    """By its series near zero, where the formula would subtract two nearly equal numbers."""
    s = x * x
    series = x * (1.0 + s * (-1.0 / 3.0 + s * (2.0 / 15.0 - s * (17.0 / 315.0))))
    return tl.where(s < 0.04, series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def _add_parts_kernel(total, parts, P, C, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):  # total (C,), parts (P, C)
    c = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    sums = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for first in range(0, P, HEIGHT):
        p = first + tl.arange(0, HEIGHT)
        sums += tl.load(parts + p[:, None] * C + c[None, :], mask=(p < P)[:, None] & (c < C)[None, :], other=0.0)
    tl.store(total + c, tl.load(total + c, mask=c < C) + tl.sum(sums, 0), mask=c < C)


def add_parts(
    total: Tensor,  # (C,) float32  accumulated into
    parts: Tensor,  # (P, C) float32
) -> None:
    P, C = parts.shape
    grid = (triton.cdiv(C, 32),)
    launch(_add_parts_kernel, grid, total, parts, P, C, inplace=(total,), HEIGHT=32, WIDTH=32, num_warps=4)
