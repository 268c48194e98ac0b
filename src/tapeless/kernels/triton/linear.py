"""Linear map: the library's matmuls; dw is accumulated in float32 within the matmul.
Formulas: ops/linear.py. Tested by: tests/kernels/triton/test_triton.py."""

from functools import partial

import torch
from torch import Tensor

from tapeless.ops import numerics
from tapeless.ops.linear import LinearSaved
from tapeless.ops.numerics import add_row_sum, rows
from tapeless.ops.op import Op


def accumulate_matmul(dw: Tensor, a: Tensor, b: Tensor, overwrite: bool) -> None:
    """dw (M, K) += a (M, N) @ b (N, K), or = with overwrite."""
    if dw.dtype == a.dtype:
        dw.addmm_(a, b, beta=0 if overwrite else 1)
    elif dw.device.type == "cpu":  # kernels in the interpreter: torch has no matmul with a wider result on a CPU
        if overwrite:
            dw.zero_()
        numerics.accumulate_matmul(dw, a, b)
    elif overwrite:
        torch.mm(a, b, out_dtype=dw.dtype, out=dw)
    else:
        torch.addmm(dw, a, b, out_dtype=dw.dtype, out=dw)


def linear_forward(
    x: Tensor,  # (..., I)
    w: Tensor,  # (O, I)
    b: Tensor | None,  # (O,)
) -> tuple[Tensor, LinearSaved]:  # y (..., O)
    flat = rows(x)
    y = flat @ w.t() if b is None else torch.addmm(b, flat, w.t())
    return y.view(*x.shape[:-1], w.shape[0]), LinearSaved(x)


def linear_backward(
    dy: Tensor,  # (..., O)
    saved: LinearSaved,
    w: Tensor,  # (O, I)
    b: Tensor | None,  # (O,)
    dw: Tensor | None,  # (O, I)  accumulated into, or overwritten
    db: Tensor | None,  # (O,)  accumulated into
    *,
    overwrite: bool,
    want_dx: bool = True,
) -> Tensor | None:  # dx (..., I)
    if dw is not None:
        accumulate_matmul(dw, rows(dy).t(), rows(saved.x), overwrite)
    if db is not None:
        add_row_sum(db, dy)
    return (rows(dy) @ w).view(*dy.shape[:-1], w.shape[1]) if want_dx else None


def linear(*, overwrite: bool = False) -> Op:
    backward = partial(linear_backward, overwrite=overwrite)
    return Op(linear_forward, backward, backward_dw=partial(backward, want_dx=False))
