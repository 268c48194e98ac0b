"""What all kernels of this folder share: how a launch is shaped, and the sum of what programs summed each for themselves.

A launch goes to the current device, which may be another one than the tensors': `on_device` makes theirs current. In the
interpreter (TRITON_INTERPRET=1) the same kernels run on the CPU, slowly, so that they can be tested without a GPU."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

Result = TypeVar("Result")


def on_device(launcher: Callable[..., Result]) -> Callable[..., Result]:
    """The launcher, with the device of its first tensor as the current one."""

    @wraps(launcher)
    def launch(*args: object, **options: object) -> Result:
        device = next(x.device for x in args if isinstance(x, Tensor))
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return launcher(*args, **options)
        with torch.cuda.device(device):
            return launcher(*args, **options)

    return launch


def contiguous(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


def unit_stride(x: Tensor) -> Tensor:
    """Features side by side; the other strides may be any."""
    return x if x.stride(-1) == 1 else x.contiguous()


def warps(elements: int) -> int:
    """So that each thread holds about sixteen elements of a program's tile: two loads of sixteen bytes in bfloat16."""
    return max(1, min(16, triton.next_power_of_2(elements) // 512))


@triton.jit
def tanh(x):
    """Near zero by its series, where the formula would subtract two numbers that are almost equal."""
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
    _add_parts_kernel[(triton.cdiv(C, 32),)](total, parts, P, C, HEIGHT=32, WIDTH=32, num_warps=4)
