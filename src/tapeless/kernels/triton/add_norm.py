"""RMSNorm and LayerNorm, by themselves and with the residual sum before them: each row is read once, each way.

    s = x + delta, rounded to its dtype      m = mean_C(s), 0 for RMSNorm      r = (mean_C((s - m)^2) + eps)^(-1/2)
    n = (s - m) r w + b
Backward: ops/rms_norm.py, ops/layer_norm.py and ops/add_norm.py. A program holds whole rows. In backward, each of up to PARTS
programs loops over its share of the rows and sums dw and db, and a second kernel adds the programs' sums in their order: the
same bits every time.
Tested by: tests/kernels/triton/test_triton.py."""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapeless.kernels.triton.launch import add_parts, contiguous, launch, on_device, warps
from tapeless.ops.add_norm import ADD_RMS_NORM, AddNormSaved
from tapeless.ops.layer_norm import LayerNormSaved
from tapeless.ops.op import Op
from tapeless.ops.rms_norm import RMSNormSaved

PARTS = 528  # most programs of a backward: four for each multiprocessor of a large GPU


@triton.jit
def _norm_forward_kernel(
    x, delta, w, b, s, n, m, r, N, C, eps,
    HAS_DELTA: tl.constexpr, HAS_BIAS: tl.constexpr, CENTRE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # x, delta, s, n (N, C); w, b (C,); m, r (N,)  # fmt: skip
    row, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (row < N)[:, None] & (c < C)[None, :]
    at = row.to(tl.int64)[:, None] * C + c[None, :]
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        total = (v + tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)).to(s.dtype.element_ty)
        tl.store(s + at, total, mask=inside)
        v = total.to(tl.float32)
    if CENTRE:
        mean = tl.sum(v, 1) / C
        tl.store(m + row, mean, mask=row < N)
        v = tl.where(inside, v - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(v * v, 1) / C + eps)
    tl.store(r + row, rstd, mask=row < N)
    y = v * rstd[:, None] * tl.load(w + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(b + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    tl.store(n + at, y.to(n.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward_kernel(
    ds, dy, x, m, r, w, dx, dw, db, N, C,
    HAS_DS: tl.constexpr, CENTRE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # ds, dy, x, dx (N, C); m, r (N,); w (C,); dw, db (programs, C)  # fmt: skip
    part, c = tl.program_id(0), tl.arange(0, WIDTH)
    weight = tl.load(w + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    dw_sum = tl.zeros([WIDTH], tl.float32)
    db_sum = tl.zeros([WIDTH], tl.float32)
    for first in range(part * ROWS, N, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < N)[:, None] & (c < C)[None, :]
        at = row.to(tl.int64)[:, None] * C + c[None, :]
        dy_ = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(r + row, mask=row < N, other=0.0)[:, None]
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if CENTRE:
            v = tl.where(inside, v - tl.load(m + row, mask=row < N, other=0.0)[:, None], 0.0)
        normed = v * rstd
        dn = dy_ * weight
        d = dn - normed * (tl.sum(dn * normed, 1) / C)[:, None]
        if CENTRE:
            d -= (tl.sum(dn, 1) / C)[:, None]
            db_sum += tl.sum(dy_, 0)
        d *= rstd
        if HAS_DS:
            d += tl.load(ds + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
        dw_sum += tl.sum(dy_ * normed, 0)
    tl.store(dw + part * C + c, dw_sum, mask=c < C)
    if CENTRE:
        tl.store(db + part * C + c, db_sum, mask=c < C)


def _tile(C: int) -> dict[str, Any]:
    """Tile of the forward, measured at C = 768 and 2048."""
    width = triton.next_power_of_2(C)
    rows = 4 if width <= 1024 else 1
    return {"ROWS": rows, "WIDTH": width, "num_warps": warps(rows * width)}


def _tile_backward(C: int) -> dict[str, Any]:
    """Few threads with many elements each: the sums over rows stay in registers."""
    width = triton.next_power_of_2(C)
    rows = max(1, min(4, 4096 // width))
    return {"ROWS": rows, "WIDTH": width, "num_warps": max(1, warps(rows * width) // 4)}


@on_device
def add_norm_forward(
    x: Tensor,  # (..., C)
    delta: Tensor | None,  # (..., C)
    w: Tensor,  # (C,)
    b: Tensor | None = None,  # (C,)
    *,
    eps: float,
    centre: bool,
    dtype: torch.dtype | None = None,  # of n, by default x's
) -> tuple[Tensor, Tensor, AddNormSaved]:  # s (..., C), n (..., C)
    x = contiguous(x)
    s = x if delta is None else torch.empty_like(x)
    n = torch.empty_like(x, dtype=dtype)
    r = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    m = torch.empty_like(r) if centre else r
    N, C, tile = r.numel(), x.shape[-1], _tile(x.shape[-1])
    launch(
        _norm_forward_kernel, (triton.cdiv(N, tile["ROWS"]),),
        x, x if delta is None else contiguous(delta), w, w if b is None else b, s, n, m, r, N, C, eps,
        HAS_DELTA=delta is not None, HAS_BIAS=b is not None, CENTRE=centre, **tile,
    )  # fmt: skip
    return s, n, AddNormSaved(LayerNormSaved(s, m, r) if centre else RMSNormSaved(s, r))


@on_device
def add_norm_backward(
    ds: Tensor | None,  # (..., C)
    dn: Tensor,  # (..., C)
    saved: AddNormSaved,
    w: Tensor,  # (C,)
    *params_and_grads: Tensor | None,  # for RMSNorm dw (C,); for LayerNorm b, dw, db; gradients accumulated into
    centre: bool,
) -> Tensor:  # dx (..., C), which is ddelta too
    x, r = contiguous(saved.norm.x), saved.norm.r
    dw, db = params_and_grads[1:] if centre else (params_and_grads[0], None)
    dx = torch.empty_like(x)
    N, C, tile = r.numel(), x.shape[-1], _tile_backward(x.shape[-1])
    parts = min(PARTS, triton.cdiv(N, tile["ROWS"]))
    sums = torch.empty(2 if centre else 1, parts, C, dtype=torch.float32, device=x.device)
    launch(
        _norm_backward_kernel, (parts,),
        x if ds is None else contiguous(ds), contiguous(dn), x, saved.norm.m if centre else r, r, w, dx, sums[0], sums[-1],
        N, C, HAS_DS=ds is not None, CENTRE=centre, **tile,
    )  # fmt: skip
    for grad, of_parts in zip((dw, db), sums, strict=False):
        if grad is not None:
            add_parts(grad, of_parts)
    return dx


def add_norm(centre: bool) -> Op:
    forward, backward = partial(add_norm_forward, centre=centre), partial(add_norm_backward, centre=centre)
    return ADD_RMS_NORM._replace(forward=forward, backward=backward)
