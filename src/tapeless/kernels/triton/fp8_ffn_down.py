"""The gate of the feed-forward layer and the linear map after it, in fp8.

Forward writes h as rows of e4m3 only; a program holds whole rows. Backward works on tiles: from dh and gate_up it computes the
columns of h, for dw, and dgate_up in both layouts, which the linear map before it reads. Of the tensors of width F only dh is
written in bfloat16.
Formulas: ops/ffn_down.py, ops/ffn_gate.py. Tested by: tests/kernels/triton/test_fp8.py."""

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapeless.kernels.triton.ffn_down import KINDS, f_df, ffn_down_backward, ffn_down_forward
from tapeless.kernels.triton.fp8_cast import (
    COLUMNS,
    E4M3,
    ROWS,
    WARPS,
    Gradient,
    as_gradient,
    empty_gradient,
    empty_rows,
    gradient_scale,
    store_columns,
    store_gradient,
    store_rows,
)
from tapeless.kernels.triton.fp8_linear import accumulate_dw, by_columns, by_rows, fits
from tapeless.kernels.triton.launch import contiguous, launch, on_device, warps
from tapeless.ops.ffn_down import FFN_DOWN, FFNDownSaved
from tapeless.ops.ffn_gate import GATED
from tapeless.ops.op import Op


class Fp8FFNDownSaved(NamedTuple):
    gate_up: Tensor  # (..., 2F), or (..., F) of the ungated kinds
    largest: Tensor  # () float32: of the scales of h


@triton.jit
def _fp8_gate_forward_kernel(
    gate_up, values, inverse, largest, N, F,
    KIND: tl.constexpr, IS_GATED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # gate_up (N, 2F) or (N, F); values (N, F), inverse (N,), largest ()  # fmt: skip
    row, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (row < N)[:, None] & (c < F)[None, :]
    gate = gate_up + row.to(tl.int64)[:, None] * (2 * F if IS_GATED else F) + c[None, :]
    f, _ = f_df(tl.load(gate, mask=inside, other=0.0).to(tl.float32), KIND)
    if IS_GATED:
        f *= tl.load(gate + F, mask=inside, other=0.0).to(tl.float32)
    store_rows(f, inside, row, N, values, row.to(tl.int64)[:, None] * F + c[None, :], inverse, largest)


@triton.jit
def _fp8_gate_backward_kernel(
    dh, gate_up, largest, h, rows, columns, N, F, scale,
    KIND: tl.constexpr, IS_GATED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # dh (N, F); gate_up, rows (N, 2F) or (N, F), columns its transpose; h (F, N)  # fmt: skip
    n, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (n < N)[:, None] & (c < F)[None, :]
    width = 2 * F if IS_GATED else F
    at = n.to(tl.int64)[:, None] * width + c[None, :]
    d = tl.load(dh + n.to(tl.int64)[:, None] * F + c[None, :], mask=inside, other=0.0).to(tl.float32)
    f, df = f_df(tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32), KIND)
    if IS_GATED:
        up = tl.load(gate_up + at + F, mask=inside, other=0.0).to(tl.float32)
        store_gradient(d * f * scale, n, F + c, inside, N, width, rows, columns)
        f, df = f * up, df * up
    store_gradient(d * df * scale, n, c, inside, N, width, rows, columns)
    store_columns(f / tl.load(largest), n, c, inside, N, h)


@on_device
def fp8_ffn_down_forward(
    gate_up: Tensor,  # (..., 2F), or (..., F) of the ungated kinds
    w: Tensor,  # (C, F)
    b: Tensor | None,  # (C,)
    *,
    name: str,
) -> tuple[Tensor, FFNDownSaved | Fp8FFNDownSaved]:  # y (..., C)
    if not fits(gate_up, w):
        return ffn_down_forward(gate_up, w, b, name=name)
    F, N = w.shape[1], gate_up.numel() // gate_up.shape[-1]
    h, width = empty_rows(N, F, w.device), triton.next_power_of_2(F)
    tile = max(1, 2048 // width)
    launch(
        _fp8_gate_forward_kernel, (triton.cdiv(N, tile),), contiguous(gate_up), *h, N, F,
        KIND=KINDS[name], IS_GATED=name in GATED, ROWS=tile, WIDTH=width, num_warps=warps(tile * width),
    )  # fmt: skip
    return by_rows(h, w, b).view(*gate_up.shape[:-1], len(w)), Fp8FFNDownSaved(gate_up, h.largest)


@on_device
def fp8_ffn_down_backward(
    dy: Tensor,  # (..., C)
    saved: FFNDownSaved | Fp8FFNDownSaved,
    w: Tensor,  # (C, F)
    b: Tensor | None,  # (C,)
    dw: Tensor | None,  # (C, F)  accumulated into, or overwritten
    db: Tensor | None,  # (C,)  accumulated into
    *,
    name: str,
    overwrite: bool,
    want_dx: bool = True,
) -> Tensor | Gradient | None:  # dgate_up, as gate_up
    if isinstance(saved, FFNDownSaved):
        return ffn_down_backward(dy, saved, w, b, dw, db, name=name, overwrite=overwrite, want_dx=want_dx)
    d, gate_up, N, F = as_gradient(dy), contiguous(saved.gate_up), dy.numel() // dy.shape[-1], w.shape[1]
    dh = by_columns(d, w) if want_dx else torch.empty(N, F, dtype=w.dtype, device=dy.device)  # (N, F)
    dgate_up = empty_gradient(N, gate_up.shape[-1], dh.device)
    h = torch.empty(F, N, dtype=E4M3, device=dh.device)  # does not depend on dh
    launch(
        _fp8_gate_backward_kernel, (triton.cdiv(N, ROWS), triton.cdiv(F, COLUMNS)),
        dh, gate_up, saved.largest, h, dgate_up.rows, dgate_up.columns, N, F, gradient_scale(N),
        KIND=KINDS[name], IS_GATED=name in GATED, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    accumulate_dw(d, h, saved.largest, dw, db, overwrite)
    return dgate_up if want_dx else None


def fp8_ffn_down(*, overwrite: bool = False) -> dict[str, Op]:
    def op(name: str) -> Op:
        forward = partial(fp8_ffn_down_forward, name=name)
        backward = partial(fp8_ffn_down_backward, name=name, overwrite=overwrite)
        return FFN_DOWN[name]._replace(forward=forward, backward=backward, backward_dw=partial(backward, want_dx=False))

    return {name: op(name) for name in KINDS}
