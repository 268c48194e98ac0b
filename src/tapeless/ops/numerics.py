"""The few numerical conventions that every op shares.
Tested by: tests/ops/test_numerics.py."""

import torch
from torch import Tensor

TEMPORARY = 2**20  # elements of a product that stand in memory at a time, where it cannot be added in place


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Statistics, softmax and sums are held in float32 at least; float64 and complex128 stay what they are."""
    return torch.promote_types(x.dtype, torch.float32)


def real_part(x: Tensor) -> Tensor:
    """What a branch or a maximum may look at: the value itself, or the real part under the complex step."""
    return x.real if x.is_complex() else x


def logsumexp(x: Tensor) -> Tensor:  # (..., V) -> (..., 1)
    """log sum exp over the last axis, shifted by the largest real part, so that no exponential overflows."""
    top = real_part(x).amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)  # a row of -inf alone: its lse is -inf, not NaN
    return (x - top).exp_().sum(-1, keepdim=True).log() + top


def rows(x: Tensor) -> Tensor:  # (..., C) -> (N, C)
    return x.reshape(-1, x.shape[-1])


def accumulate_matmul(dw: Tensor, a: Tensor, b: Tensor) -> None:  # dw (M, K) += a (M, N) @ b (N, K)
    """Accumulate a matrix product. Where the gradient has the product's dtype, without a temporary; where it is wider, in
    parts that are rounded to the product's dtype first, since torch has no bfloat16 product with a float32 result on every
    device."""
    if dw.dtype == a.dtype:
        dw.addmm_(a, b)
    else:
        rows_at_once = max(1, TEMPORARY // b.shape[1])
        for part, a_part in zip(dw.split(rows_at_once), a.split(rows_at_once), strict=True):
            part += a_part @ b


def add_row_sum(dw: Tensor, x: Tensor) -> None:  # dw (C,) += sum over rows of x (..., C)
    dw += rows(x).sum(0, dtype=accumulation_dtype(x))


def sum_to(x: Tensor, shape: torch.Size) -> Tensor:
    """The adjoint of broadcasting from `shape`: sum over every axis that was stretched or added."""
    added = x.dim() - len(shape)
    stretched = [i + added for i, n in enumerate(shape) if n == 1 and x.shape[i + added] != 1]
    axes = [*range(added), *stretched]
    return x.sum(axes, keepdim=True).reshape(shape) if axes else x
