"""Causal attention for what the library does not support: float32, documents, keys of a kv_cache, odd widths.

Formulas: ops/attention.py. A block of queries loops over its visible keys with a running maximum. Backward recomputes p from
lse. sum_s(dp p) is computed from the same p and dp that it is subtracted from, in a first loop over the keys: if a softmax is
nearly one-hot the two almost cancel. Each program writes its own rows, so the bits are always the same.
Tested by: tests/kernels/triton/test_triton.py."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapeless.kernels.triton.launch import contiguous, launch, on_device, unit_stride
from tapeless.ops.attention import AttentionSaved, require_matching_documents

LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _tile(x, at_b, at_h, at_t, t, c, T, D):
    """Rows t of one head (rows, WIDTH), zeros beyond T and D."""
    return tl.load(x + at_b + at_h + t[:, None] * at_t + c[None, :], mask=(t < T)[:, None] & (c < D)[None, :], other=0.0)


@triton.jit
def _seen(t, s, T, S, docs, b, DOCUMENTS: tl.constexpr):
    """Whether query t attends to key s, (queries, keys)."""
    seen = (s[None, :] <= t[:, None] + S - T) & (s < S)[None, :] & (t < T)[:, None]
    if DOCUMENTS:
        of_t = tl.load(docs + b * T + t, mask=t < T, other=0)
        of_s = tl.load(docs + b * T + s, mask=s < S, other=0)
        seen = seen & (of_t[:, None] == of_s[None, :])
    return seen


@triton.jit
def _attention_forward_kernel(
    q, k, v, o, lse, docs, qb, qh, qt, kb, kh, kt, vb, vh, vt, H, G, T, S, D, scale,
    DOCUMENTS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # q (B, H, T, D), k, v (B, G, S, D), o (B, T, H, D), lse (B, H, T)  # fmt: skip
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    g = h // (H // G)
    t, c = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    query = _tile(q, b * qb, h * qh, qt, t, c, T, D)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(0, tl.minimum(S, (tl.program_id(1) + 1) * ROWS + S - T), KEYS):
        s = first + tl.arange(0, KEYS)
        z = tl.dot(query, tl.trans(_tile(k, b * kb, g * kh, kt, s, c, S, D)), input_precision=PRECISION) * scale
        z = tl.where(_seen(t, s, T, S, docs, b, DOCUMENTS), z, float("-inf"))
        higher = tl.maximum(top, tl.max(z, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2((z - level[:, None]) * LOG2E)
        fade = tl.exp2((top - level) * LOG2E)
        total = total * fade + tl.sum(p, 1)
        value = _tile(v, b * vb, g * vh, vt, s, c, S, D)
        out = out * fade[:, None] + tl.dot(p.to(value.dtype), value, input_precision=PRECISION)
        top = higher
    out = out / total[:, None]
    at = ((b * T + t[:, None]) * H + h) * D + c[None, :]
    tl.store(o + at, out.to(o.dtype.element_ty), mask=(t < T)[:, None] & (c < D)[None, :])
    tl.store(lse + (b * H + h) * T + t, top + tl.log(total), mask=t < T)


@triton.jit
def _p_dp(query, key, value, do, norm, seen, scale, PRECISION: tl.constexpr):
    """p and dp of a block, (queries, keys)."""
    z = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    p = tl.where(seen, tl.exp2((z - norm[:, None]) * LOG2E), 0.0)
    return p, tl.dot(do, tl.trans(value), input_precision=PRECISION)


@triton.jit
def _attention_queries_kernel(
    q, k, v, do, lse, docs, sums, dq, qb, qh, qt, kb, kh, kt, vb, vh, vt, H, G, T, S, D, scale,
    DOCUMENTS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # do, dq (B, T, H, D); lse, sums (B, H, T)  # fmt: skip
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    g = h // (H // G)
    t, c = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    query = _tile(q, b * qb, h * qh, qt, t, c, T, D)
    upstream = _tile(do, b * T * H * D, h * D, H * D, t, c, T, D)
    norm = tl.load(lse + (b * H + h) * T + t, mask=t < T, other=0.0)
    end = tl.minimum(S, (tl.program_id(1) + 1) * ROWS + S - T)
    against = tl.zeros([ROWS], tl.float32)
    for first in range(0, end, KEYS):
        s = first + tl.arange(0, KEYS)
        key, value = _tile(k, b * kb, g * kh, kt, s, c, S, D), _tile(v, b * vb, g * vh, vt, s, c, S, D)
        p, dp = _p_dp(query, key, value, upstream, norm, _seen(t, s, T, S, docs, b, DOCUMENTS), scale, PRECISION)
        against += tl.sum(p * dp, 1)
    tl.store(sums + (b * H + h) * T + t, against, mask=t < T)
    gradient = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(0, end, KEYS):
        s = first + tl.arange(0, KEYS)
        key, value = _tile(k, b * kb, g * kh, kt, s, c, S, D), _tile(v, b * vb, g * vh, vt, s, c, S, D)
        p, dp = _p_dp(query, key, value, upstream, norm, _seen(t, s, T, S, docs, b, DOCUMENTS), scale, PRECISION)
        dz = p * (dp - against[:, None]) * scale
        gradient += tl.dot(dz.to(key.dtype), key, input_precision=PRECISION)
    at = ((b * T + t[:, None]) * H + h) * D + c[None, :]
    tl.store(dq + at, gradient.to(dq.dtype.element_ty), mask=(t < T)[:, None] & (c < D)[None, :])


@triton.jit
def _attention_keys_kernel(
    q, k, v, do, lse, docs, sums, dk, dv, qb, qh, qt, kb, kh, kt, vb, vh, vt, H, G, T, S, D, scale,
    DOCUMENTS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # do (B, T, H, D); lse, sums (B, H, T); dk, dv (B, S, G, D)  # fmt: skip
    b, g = (tl.program_id(0) // G).to(tl.int64), tl.program_id(0) % G
    s, c = tl.program_id(1) * KEYS + tl.arange(0, KEYS), tl.arange(0, WIDTH)
    key, value = _tile(k, b * kb, g * kh, kt, s, c, S, D), _tile(v, b * vb, g * vh, vt, s, c, S, D)
    key_sum, value_sum = tl.zeros([KEYS, WIDTH], tl.float32), tl.zeros([KEYS, WIDTH], tl.float32)
    start = tl.maximum(0, tl.program_id(1) * KEYS + T - S) // ROWS * ROWS
    for h in range(g * (H // G), (g + 1) * (H // G)):
        for first in range(start, T, ROWS):
            t = first + tl.arange(0, ROWS)
            query = _tile(q, b * qb, h * qh, qt, t, c, T, D)
            upstream = _tile(do, b * T * H * D, h * D, H * D, t, c, T, D)
            at = (b * H + h) * T + t
            norm, against = tl.load(lse + at, mask=t < T, other=0.0), tl.load(sums + at, mask=t < T, other=0.0)
            p, dp = _p_dp(query, key, value, upstream, norm, _seen(t, s, T, S, docs, b, DOCUMENTS), scale, PRECISION)
            value_sum += tl.dot(tl.trans(p.to(value.dtype)), upstream, input_precision=PRECISION)
            dz = p * (dp - against[:, None]) * scale
            key_sum += tl.dot(tl.trans(dz.to(query.dtype)), query, input_precision=PRECISION)
    at = ((b * S + s[:, None]) * G + g) * D + c[None, :]
    inside = (s < S)[:, None] & (c < D)[None, :]
    tl.store(dk + at, key_sum.to(dk.dtype.element_ty), mask=inside)
    tl.store(dv + at, value_sum.to(dv.dtype.element_ty), mask=inside)


def _blocks(q: Tensor, documents: Tensor | None) -> dict[str, Any]:
    width = max(16, triton.next_power_of_2(q.shape[-1]))
    side = 64 if width <= 64 and q.dtype != torch.float32 else 32
    precision = "ieee" if q.dtype == torch.float32 else None
    return {
        "DOCUMENTS": documents is not None,
        "ROWS": side,
        "KEYS": side,
        "WIDTH": width,
        "PRECISION": precision,
        "num_warps": 4,
    }


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    strides = [stride for x in (q, k, v) for stride in x.stride()[:3]]
    return *strides, q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], 1 / math.sqrt(q.shape[3])


@on_device
def own_forward(
    q: Tensor,  # (B, H, T, D)
    k: Tensor,  # (B, G, S, D)
    v: Tensor,  # (B, G, S, D)
    documents: Tensor | None = None,  # (B, T) int64
) -> tuple[Tensor, AttentionSaved]:  # o (B, T, H*D)
    require_matching_documents(documents, q, k)
    (B, H, T, D), G = q.shape, k.shape[1]
    q_, k_, v_ = unit_stride(q), unit_stride(k), unit_stride(v)
    o = torch.empty(B, T, H * D, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, G, H // G, T, 1, dtype=torch.float32, device=q.device)
    blocks, docs = _blocks(q, documents), lse if documents is None else contiguous(documents)
    grid = (B * H, triton.cdiv(T, blocks["ROWS"]))
    launch(_attention_forward_kernel, grid, q_, k_, v_, o, lse, docs, *_sizes(q_, k_, v_), **blocks)
    return o, AttentionSaved(q, k, v, o, lse, documents)


@on_device
def own_backward(
    do: Tensor,  # (B, T, H*D)
    saved: AttentionSaved,
) -> tuple[Tensor, Tensor, Tensor]:  # dq (B, H, T, D), dk (B, G, S, D), dv (B, G, S, D)
    q, k, v, lse = unit_stride(saved.q), unit_stride(saved.k), unit_stride(saved.v), saved.lse
    (B, H, T, D), G, S = q.shape, k.shape[1], k.shape[2]
    dq = torch.empty(B, T, H, D, dtype=q.dtype, device=q.device)
    dk, dv = torch.empty(2, B, S, G, D, dtype=q.dtype, device=q.device)
    sums, do = torch.empty_like(lse), contiguous(do)
    blocks, docs = _blocks(q, saved.documents), lse if saved.documents is None else contiguous(saved.documents)
    inputs, sizes = (q, k, v, do, lse, docs, sums), _sizes(q, k, v)
    launch(_attention_queries_kernel, (B * H, triton.cdiv(T, blocks["ROWS"])), *inputs, dq, *sizes, **blocks)
    launch(_attention_keys_kernel, (B * G, triton.cdiv(S, blocks["KEYS"])), *inputs, dk, dv, *sizes, **blocks)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
