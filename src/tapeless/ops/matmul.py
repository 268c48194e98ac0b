"""Batched matmul; the batch axes broadcast.

    y = a b               y (..., M, N) = a (..., M, K) @ b (..., K, N)
Backward.
    da = dy b'            (..., M, K) = (..., M, N) @ (..., N, K)
    db = a' dy            (..., K, N) = (..., K, M) @ (..., M, N)
each summed over the batch axes along which it was repeated.
Saved: a and b.
Tested by: tests/ops/test_matmul.py."""

from typing import NamedTuple

from torch import Tensor

from tapeless.ops.numerics import sum_to
from tapeless.ops.op import Op


class MatmulSaved(NamedTuple):
    a: Tensor  # (..., M, K)
    b: Tensor  # (..., K, N)


def matmul_forward(
    a: Tensor,  # (..., M, K)
    b: Tensor,  # (..., K, N)
) -> tuple[Tensor, MatmulSaved]:  # y (..., M, N)
    return a @ b, MatmulSaved(a, b)


def matmul_backward(
    dy: Tensor,  # (..., M, N)
    saved: MatmulSaved,
) -> tuple[Tensor, Tensor]:  # da (..., M, K), db (..., K, N)
    a, b = saved
    da = dy @ b.transpose(-1, -2)
    db = a.transpose(-1, -2) @ dy
    return sum_to(da, a.shape), sum_to(db, b.shape)


MATMUL = Op(matmul_forward, matmul_backward, grads=("da", "db"))
