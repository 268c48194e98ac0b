"""Linear map with all three matmuls in fp8: y = x w' by rows, dx = dy w and dw += dy' x by columns (fp8_cast.py).

Sums over features use the tensor cores' fast accumulation, some bits less than float32; the longer sums over tokens are in
full float32. The library needs sizes that are multiples of 16: others, and the few rows of a decoding step, use linear.py.
Formulas: ops/linear.py. Tested by: tests/kernels/triton/test_fp8.py."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tapeless.kernels.triton.fp8_cast import Gradient, Rows, as_gradient, in_columns, in_rows
from tapeless.kernels.triton.linear import linear_backward, linear_forward
from tapeless.ops.linear import LinearSaved
from tapeless.ops.op import Op

MULTIPLE = 16


class Fp8LinearSaved(NamedTuple):
    """Rows of x. There is no field x for a recompute policy to drop: this is already half of x's bytes."""

    rows: Rows
    shape: torch.Size  # of x


def fits(x: Tensor, w: Tensor) -> bool:  # (..., I), (O, I)
    return not any(size % MULTIPLE for size in (x.numel() // x.shape[-1], *w.shape))


def scaled_matmul(
    a: Tensor,  # (M, K) fp8
    b: Tensor,  # (N, K) fp8
    inverse_a: Tensor,  # () or (M, 1) float32
    inverse_b: Tensor,  # () or (N, 1) float32
    dtype: torch.dtype,
    *,
    fast_accum: bool = False,
    out: Tensor | None = None,  # (M, N)
) -> Tensor:  # (M, N): a b'
    if a.is_meta:
        return torch.empty(len(a), len(b), dtype=dtype, device=a.device) if out is None else out
    if not a.is_cuda:  # kernels in the interpreter
        exact = ((a.float() * inverse_a) @ (b.float() * inverse_b).t()).to(dtype)
        return exact if out is None else out.copy_(exact)
    scales = (inverse_a, inverse_b if inverse_b.dim() == 0 else inverse_b.t())
    if out is None:
        return torch._scaled_mm(a, b.t(), *scales, out_dtype=dtype, use_fast_accum=fast_accum)
    return torch._scaled_mm(a, b.t(), *scales, out_dtype=dtype, use_fast_accum=fast_accum, out=out)


def by_rows(
    x: Rows,  # (N, I)
    w: Tensor,  # (O, I)
    b: Tensor | None,  # (O,)
) -> Tensor:  # y (N, O)
    rows = in_rows(w)
    y = scaled_matmul(x.values, rows.values, x.inverse, rows.inverse, w.dtype, fast_accum=True)
    return y if b is None else y.add_(b)


def by_columns(
    dy: Gradient,  # (N, O)
    w: Tensor,  # (O, I)
) -> Tensor:  # dx (N, I)
    rows = in_rows(w)
    return scaled_matmul(dy.rows, in_columns(*rows), dy.inverse, rows.largest, w.dtype, fast_accum=True)


def accumulate_dw(
    dy: Gradient,  # (N, O)
    columns: Tensor,  # (I, N) e4m3: x
    inverse: Tensor,  # () float32
    dw: Tensor | None,  # (O, I)  accumulated into, or overwritten
    db: Tensor | None,  # (O,)  accumulated into
    overwrite: bool,
) -> None:
    if dw is not None and overwrite:
        scaled_matmul(dy.columns, columns, dy.inverse, inverse, dw.dtype, out=dw)
    elif dw is not None:
        dw += scaled_matmul(dy.columns, columns, dy.inverse, inverse, dw.dtype)
    if db is not None:
        ones = torch.ones(MULTIPLE, columns.shape[1], dtype=torch.float32, device=columns.device).to(columns.dtype)
        db += scaled_matmul(dy.columns, ones, dy.inverse, torch.ones_like(inverse), db.dtype)[:, 0]


def fp8_linear_forward(
    x: Tensor,  # (..., I)
    w: Tensor,  # (O, I)
    b: Tensor | None,  # (O,)
) -> tuple[Tensor, LinearSaved | Fp8LinearSaved]:  # y (..., O)
    if not fits(x, w):
        return linear_forward(x, w, b)
    rows = in_rows(x)
    return by_rows(rows, w, b).view(*x.shape[:-1], len(w)), Fp8LinearSaved(rows, x.shape)


def fp8_linear_backward(
    dy: Tensor | Gradient,  # (..., O)
    saved: LinearSaved | Fp8LinearSaved,
    w: Tensor,  # (O, I)
    b: Tensor | None,  # (O,)
    dw: Tensor | None,  # (O, I)  accumulated into, or overwritten
    db: Tensor | None,  # (O,)  accumulated into
    *,
    overwrite: bool,
    want_dx: bool = True,
) -> Tensor | None:  # dx (..., I)
    if isinstance(saved, LinearSaved):
        return linear_backward(_unscaled(dy, saved, w), saved, w, b, dw, db, overwrite=overwrite, want_dx=want_dx)
    if dw is None and db is None and not want_dx:
        return None
    d = dy if isinstance(dy, Gradient) else as_gradient(dy)
    if dw is not None or db is not None:
        accumulate_dw(d, in_columns(*saved.rows), saved.rows.largest, dw, db, overwrite)
    return by_columns(d, w).view(saved.shape) if want_dx else None


def _unscaled(dy: Tensor | Gradient, saved: LinearSaved, w: Tensor) -> Tensor:  # (..., O)
    """Another op may pass an fp8 gradient to a linear map whose sizes fp8 does not support."""
    if not isinstance(dy, Gradient):
        return dy
    return (dy.rows.to(w.dtype) * dy.inverse.to(w.dtype)).view(*saved.x.shape[:-1], len(w))


def fp8_linear(*, overwrite: bool = False) -> Op:
    backward = partial(fp8_linear_backward, overwrite=overwrite)
    return Op(fp8_linear_forward, backward, backward_dw=partial(backward, want_dx=False))
