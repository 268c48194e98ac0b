"""The few numerical conventions that every op shares.
Tested by: tests/ops/test_numerics.py."""

from typing import Any

import torch
from torch import Tensor

TEMPORARY = 2**20  # elements of a matmul in memory at a time, if it cannot be accumulated in place


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Statistics, softmax and sums are in float32 or wider; float64 and complex128 stay as they are."""
    return torch.promote_types(x.dtype, torch.float32)


def real_part(x: Tensor) -> Tensor:
    """The values for branches and maxima: x itself, or its real part under the complex step."""
    return x.real if x.is_complex() else x


def logsumexp(x: Tensor) -> Tensor:  # (..., V) -> (..., 1)
    """log sum exp over the last axis, shifted by the largest real part, so that no exponential overflows."""
    top = real_part(x).amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)  # a row of -inf alone: its lse is -inf, not NaN
    return (x - top).exp_().sum(-1, keepdim=True).log() + top


def rows(x: Tensor) -> Tensor:  # (..., C) -> (N, C)
    return x.reshape(-1, x.shape[-1])


def accumulate_matmul(dw: Tensor, a: Tensor, b: Tensor) -> None:  # dw (M, K) += a (M, N) @ b (N, K)
    """Accumulate a matmul. Without a temporary if dw has the dtype of a and b; if it is wider, in parts that are rounded to
    that dtype first, since torch does not have a bfloat16 matmul with a float32 result on every device."""
    if dw.dtype == a.dtype:
        dw.addmm_(a, b)
    else:
        rows_at_once = max(1, TEMPORARY // b.shape[1])
        for part, a_part in zip(dw.split(rows_at_once), a.split(rows_at_once), strict=True):
            part += a_part @ b


def add_row_sum(dw: Tensor, x: Tensor) -> None:  # dw (C,) += sum over rows of x (..., C)
    dw += rows(x).sum(0, dtype=accumulation_dtype(x))


def sum_to(x: Tensor, shape: torch.Size) -> Tensor:
    """The adjoint of broadcasting from `shape`: sum over every axis that was expanded or added."""
    added = x.dim() - len(shape)
    expanded = [i + added for i, n in enumerate(shape) if n == 1 and x.shape[i + added] != 1]
    axes = [*range(added), *expanded]
    return x.sum(axes, keepdim=True).reshape(shape) if axes else x


def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream for copies beside the kernels. torch's streams are shared, a fixed number of each priority: one of the usual
    priority could be that on which another thread is capturing a graph."""
    return torch.cuda.Stream(device, priority=-1)


class HostCopy:
    """A tensor on its way to the host, which waits only when the values are read.

    On a GPU it goes to pinned memory: beside copies to pageable memory that wait for a step, those of a checkpoint took three
    times as long."""

    def __init__(self, x: Tensor):
        on_gpu = x.device.type == "cuda"
        self._values = torch.empty(x.shape, dtype=x.dtype, pin_memory=on_gpu)
        self._values.copy_(x, non_blocking=True)
        self._copied = torch.cuda.Event() if on_gpu else None
        if self._copied is not None:
            self._copied.record()

    def read(self) -> list[Any]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()
