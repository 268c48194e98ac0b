"""From the fused q, k, v projection to the heads that attention reads, and back, each in one pass. Formulas: ops/qkv_rope.py.

A program holds the heads of q, k or v of some rows, split into their lower and upper halves, which are rotated together. q, k
and v share one buffer (B, T, H+2G, D), and attention reads them with strides. Each program sums its gradient of the norms'
weights; the sums are then added in the order of the programs.
Tested by: tests/kernels/triton/test_triton.py."""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapeless.kernels.triton.launch import add_parts, contiguous, launch, on_device, unit_stride, warps
from tapeless.ops.op import Op
from tapeless.ops.qkv_rope import QKV_ROPE, QKVRopeSaved
from tapeless.ops.rope import rope_tables

PARTS = 1056  # most programs for each of q, k and v, if sums over rows are needed
TILE = 1024  # elements that a program holds at a time


@triton.jit
def one_of(which, q, k, v):
    """One of three, by an index that all threads of a program share."""
    return q if which == 0 else (k if which == 1 else v)


@triton.jit
def _places(n0, heads, first_head, all_heads, N, D, half, ROWS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Of a tile (ROWS * HEADS, WIDTH): its rows, its heads, their offsets in (N, all heads, D), and the masks of the lower
    and of the upper halves."""
    i, c = tl.arange(0, ROWS * HEADS), tl.arange(0, WIDTH)
    n, head = n0 + i // HEADS, i % HEADS
    there = ((n < N) & (head < heads))[:, None]
    at = (n.to(tl.int64) * all_heads + first_head + head)[:, None] * D + c[None, :]
    return n, head, at, there & (c < half)[None, :], there & (half + c < D)[None, :]


@triton.jit
def angles(cos, sin, t, c, half, inside):
    at = t[:, None] * half + c[None, :]
    return tl.load(cos + at, mask=inside, other=0.0), tl.load(sin + at, mask=inside, other=0.0)


@triton.jit
def _heads_forward_kernel(
    qkv, wq, wk, cos, sin, out, r, N, T, H, G, D, half, offset, eps,
    NORM: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # qkv, out (N, H+2G, D); wq, wk (D,); cos, sin (at least offset + T, D/2); r (N, H+G)  # fmt: skip
    which, c = tl.program_id(1), tl.arange(0, WIDTH)
    first_head = one_of(which, 0, H, H + G)
    heads = one_of(which, H, G, G)
    n, head, at, in_lo, in_hi = _places(tl.program_id(0) * ROWS, heads, first_head, H + 2 * G, N, D, half, ROWS, HEADS, WIDTH)
    lo = tl.load(qkv + at, mask=in_lo, other=0.0).to(tl.float32)
    hi = tl.load(qkv + at + half, mask=in_hi, other=0.0).to(tl.float32)
    if which < 2:
        if NORM:
            w = wq if which == 0 else wk
            rstd = 1.0 / tl.sqrt((tl.sum(lo * lo, 1) + tl.sum(hi * hi, 1)) / D + eps)
            tl.store(r + n * (H + G) + first_head + head, rstd, mask=(n < N) & (head < heads))
            w_lo = tl.load(w + c, mask=c < half, other=0.0).to(tl.float32)[None, :]
            w_hi = tl.load(w + half + c, mask=half + c < D, other=0.0).to(tl.float32)[None, :]
            element: tl.constexpr = qkv.dtype.element_ty  # rounded between norm and rotation, as two ops would
            lo = (lo * rstd[:, None] * w_lo).to(element).to(tl.float32)
            hi = (hi * rstd[:, None] * w_hi).to(element).to(tl.float32)
        if ROPE:
            cosine, sine = angles(cos, sin, offset + n % T, c, half, in_lo)
            lo, hi = lo * cosine - hi * sine, hi * cosine + lo * sine
    tl.store(out + at, lo.to(out.dtype.element_ty), mask=in_lo)
    tl.store(out + at + half, hi.to(out.dtype.element_ty), mask=in_hi)


@triton.jit
def _heads_backward_kernel(
    dq, dk, dv, qb, qh, qt, kb, kh, kt, vb, vh, vt, qkv, wq, wk, r, cos, sin, dqkv, dw, N, T, H, G, D, half, offset,
    NORM: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # dq (B, H, T, D), dk, dv (B, G, T, D); qkv, dqkv (N, H+2G, D); r (N, H+G); dw (programs, 2 D)  # fmt: skip
    which, c = tl.program_id(1), tl.arange(0, WIDTH)
    first_head, heads = one_of(which, 0, H, H + G), one_of(which, H, G, G)
    upstream = one_of(which, dq, dk, dv)
    of_b, of_h, of_t = one_of(which, qb, kb, vb), one_of(which, qh, kh, vh), one_of(which, qt, kt, vt)
    dw_lo, dw_hi = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for first in range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS):
        n, head, at, in_lo, in_hi = _places(first, heads, first_head, H + 2 * G, N, D, half, ROWS, HEADS, WIDTH)
        source = upstream + ((n // T).to(tl.int64) * of_b + (n % T) * of_t + head * of_h)[:, None] + c[None, :]
        lo = tl.load(source, mask=in_lo, other=0.0).to(tl.float32)
        hi = tl.load(source + half, mask=in_hi, other=0.0).to(tl.float32)
        if which < 2:
            if ROPE:
                cosine, sine = angles(cos, sin, offset + n % T, c, half, in_lo)
                lo, hi = lo * cosine + hi * sine, hi * cosine - lo * sine
            if NORM:
                w = wq if which == 0 else wk
                rstd = tl.load(r + n * (H + G) + first_head + head, mask=(n < N) & (head < heads), other=0.0)[:, None]
                x_lo = tl.load(qkv + at, mask=in_lo, other=0.0).to(tl.float32) * rstd
                x_hi = tl.load(qkv + at + half, mask=in_hi, other=0.0).to(tl.float32) * rstd
                dw_lo += tl.sum(lo * x_lo, 0)
                dw_hi += tl.sum(hi * x_hi, 0)
                dn_lo = lo * tl.load(w + c, mask=c < half, other=0.0).to(tl.float32)[None, :]
                dn_hi = hi * tl.load(w + half + c, mask=half + c < D, other=0.0).to(tl.float32)[None, :]
                against = ((tl.sum(dn_lo * x_lo, 1) + tl.sum(dn_hi * x_hi, 1)) / D)[:, None]
                lo, hi = rstd * (dn_lo - x_lo * against), rstd * (dn_hi - x_hi * against)
        tl.store(dqkv + at, lo.to(dqkv.dtype.element_ty), mask=in_lo)
        tl.store(dqkv + at + half, hi.to(dqkv.dtype.element_ty), mask=in_hi)
    if NORM:
        part = dw + (tl.program_id(0) * 2 + which) * D + c
        tl.store(part, dw_lo, mask=(c < half) & (which < 2))
        tl.store(part + half, dw_hi, mask=(half + c < D) & (which < 2))


class Tables:
    """cos and sin of all positions requested so far, by width, base and device. A table that has grown is not freed, since a
    captured graph may still read it. Lengths double, so that all together are at most twice the last."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, float, torch.device], list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, D: int, theta: float, length: int, device: torch.device) -> tuple[Tensor, Tensor]:  # (>= length, D/2)
        made = self._made.setdefault((D, theta, device), [])
        if not made or len(made[-1][0]) < length:
            like = torch.empty(1, device=device).expand(max(256, triton.next_power_of_2(length)), D)
            made.append(rope_tables(like, theta, 0))
        return made[-1]


def _tile(H: int, G: int, D: int) -> dict[str, Any]:
    heads, width = triton.next_power_of_2(max(H, G)), triton.next_power_of_2((D + 1) // 2)
    rows = max(1, TILE // (2 * heads * width))
    return {"ROWS": rows, "HEADS": heads, "WIDTH": width, "num_warps": warps(2 * rows * heads * width)}


@on_device
def qkv_rope_forward(
    qkv: Tensor,  # (B, T, (H+2G)*D)
    wq_norm: Tensor | None,  # (D,)
    wk_norm: Tensor | None,  # (D,)
    *,
    num_heads: int,
    num_kv_heads: int,
    theta: float | None,
    eps: float,
    offset: int = 0,
    tables: Tables,
) -> tuple[Tensor, Tensor, Tensor, QKVRopeSaved | None]:  # q (B, H, T, D), k (B, G, T, D), v (B, G, T, D)
    (B, T, width), H, G = qkv.shape, num_heads, num_kv_heads
    D = width // (H + 2 * G)
    heads = torch.empty(B, T, H + 2 * G, D, dtype=qkv.dtype, device=qkv.device)
    cos, sin = (heads, heads) if theta is None else tables(D, theta, offset + T, qkv.device)
    normed = wq_norm is not None and wk_norm is not None
    r = torch.empty(B, T, H + G, dtype=torch.float32, device=qkv.device) if normed else cos
    wq, wk = (wq_norm, wk_norm) if normed else (heads, heads)
    tile = _tile(H, G, D)
    launch(
        _heads_forward_kernel, (triton.cdiv(B * T, tile["ROWS"]), 3),
        contiguous(qkv), wq, wk, cos, sin, heads, r, B * T, T, H, G, D, (D + 1) // 2, offset, eps,
        NORM=normed, ROPE=theta is not None, **tile,
    )  # fmt: skip
    q, k, v = heads.transpose(1, 2).split([H, G, G], 1)
    if not normed:
        return q, k, v, None
    rq, rk = (part.transpose(1, 2).unsqueeze(-1) for part in r.split([H, G], 2))
    return q, k, v, QKVRopeSaved(qkv, rq, rk)


@on_device
def qkv_rope_backward(
    dq: Tensor,  # (B, H, T, D)
    dk: Tensor,  # (B, G, T, D)
    dv: Tensor,  # (B, G, T, D)
    saved: QKVRopeSaved | None,
    wq_norm: Tensor | None,  # (D,)
    wk_norm: Tensor | None,  # (D,)
    dwq_norm: Tensor | None,  # (D,)  accumulated into
    dwk_norm: Tensor | None,  # (D,)  accumulated into
    *,
    theta: float | None,
    offset: int = 0,
    tables: Tables,
) -> Tensor:  # dqkv (B, T, (H+2G)*D)
    (B, H, T, D), G = dq.shape, dk.shape[1]
    dq, dk, dv = unit_stride(dq), unit_stride(dk), unit_stride(dv)
    dqkv = torch.empty(B, T, (H + 2 * G) * D, dtype=dq.dtype, device=dq.device)
    cos, sin = (dqkv, dqkv) if theta is None else tables(D, theta, offset + T, dq.device)
    strides = [stride for x in (dq, dk, dv) for stride in x.stride()[:3]]
    tile = _tile(H, G, D)
    parts = triton.cdiv(B * T, tile["ROWS"])
    if saved is None:
        qkv, wq, wk, r, dw = dqkv, dqkv, dqkv, cos, cos
    else:
        parts = min(PARTS, parts)
        assert wq_norm is not None
        assert wk_norm is not None
        qkv, wq, wk = contiguous(saved.qkv), wq_norm, wk_norm
        r = torch.cat([saved.rq, saved.rk], 1).squeeze(-1).transpose(1, 2).contiguous()  # (B, T, H+G)
        dw = torch.empty(parts, 2 * D, dtype=torch.float32, device=dq.device)
    launch(
        _heads_backward_kernel, (parts, 3),
        dq, dk, dv, *strides, qkv, wq, wk, r, cos, sin, dqkv, dw, B * T, T, H, G, D, (D + 1) // 2, offset,
        NORM=saved is not None, ROPE=theta is not None, **tile,
    )  # fmt: skip
    if saved is not None:
        for grad, of_parts in zip((dwq_norm, dwk_norm), dw.split(D, 1), strict=True):
            if grad is not None:
                add_parts(grad, of_parts.contiguous())
    return dqkv


def qkv_rope() -> Op:
    tables = Tables()
    forward, backward = partial(qkv_rope_forward, tables=tables), partial(qkv_rope_backward, tables=tables)
    return QKV_ROPE._replace(forward=forward, backward=backward)
