"""Softmax and log-softmax over the last axis.

    y = exp(x - lse)      lse = log sum_V exp(x), so that no row overflows
Backward. dy_i/dx_j = y_i ([i = j] - y_j), hence
    dx = y (dy - sum_V(dy y))
Log-softmax: y = x - lse, dlse/dx = exp(y), hence
    dx = dy - exp(y) sum_V(dy)
Saved: y.
Tested by: tests/ops/test_softmax.py."""

from typing import NamedTuple

from torch import Tensor

from tapeless.ops.numerics import accumulation_dtype, logsumexp
from tapeless.ops.op import Op


class SoftmaxSaved(NamedTuple):
    y: Tensor  # (..., V)


def softmax_forward(
    x: Tensor,  # (..., V)
) -> tuple[Tensor, SoftmaxSaved]:  # y (..., V)
    xa = x.to(accumulation_dtype(x))
    y = (xa - logsumexp(xa)).exp().to(x.dtype)
    return y, SoftmaxSaved(y)


def softmax_backward(
    dy: Tensor,  # (..., V)
    saved: SoftmaxSaved,
) -> Tensor:  # dx (..., V)
    y = saved.y.to(accumulation_dtype(dy))
    return (y * (dy - (dy * y).sum(-1, keepdim=True))).to(dy.dtype)


def log_softmax_forward(
    x: Tensor,  # (..., V)
) -> tuple[Tensor, SoftmaxSaved]:  # y (..., V)
    xa = x.to(accumulation_dtype(x))
    y = (xa - logsumexp(xa)).to(x.dtype)
    return y, SoftmaxSaved(y)


def log_softmax_backward(
    dy: Tensor,  # (..., V)
    saved: SoftmaxSaved,
) -> Tensor:  # dx (..., V)
    y = saved.y.to(accumulation_dtype(dy))
    return (dy - y.exp() * dy.sum(-1, keepdim=True, dtype=y.dtype)).to(dy.dtype)


SOFTMAX = Op(softmax_forward, softmax_backward)
LOG_SOFTMAX = Op(log_softmax_forward, log_softmax_backward)
