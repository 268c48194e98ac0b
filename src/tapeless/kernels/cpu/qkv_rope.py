"""From the fused q, k, v projection to the heads that attention reads, one pass each way: split, QK-norm, rotation.

Formulas: ops/qkv_rope.py. A unit of work is a span of tokens with all their heads.
Tested by: tests/kernels/test_cpu.py."""

from functools import lru_cache, partial
from math import sqrt

import numpy as np
import torch
from numba import prange
from torch import Tensor

from tapeless.kernels.cpu.add_norm import NO_GRAD, add_parts
from tapeless.kernels.cpu.capture import launch
from tapeless.kernels.cpu.jit import array, inlined, kernel, matrix, put, wide
from tapeless.kernels.workspace import Workspace
from tapeless.ops.op import Op
from tapeless.ops.qkv_rope import QKV_ROPE, QKVRopeSaved
from tapeless.ops.rope import rope_tables

PARTS = 16  # spans of tokens; the norms' gradients are summed per span, whatever the number of threads
ZERO, ONE = np.float32(0), np.float32(1)
NO_NORMS = np.empty((0, 0, 0), np.float32)


@lru_cache(maxsize=8)
def _tables(T: int, D: int, theta: float | None, offset: int) -> tuple[np.ndarray, np.ndarray]:  # cos, sin (T, D/2)
    """(0, D/2) without a rotation."""
    if theta is None:
        return np.empty((0, D // 2), np.float32), np.empty((0, D // 2), np.float32)
    cos, sin = rope_tables(torch.empty(T, D, dtype=torch.float32, device="cpu"), theta, offset)
    return array(cos), array(sin)


@inlined
def _load(x, row):  # (D,) each
    for d in range(len(x)):
        row[d] = wide(x[d])


@inlined
def _copy(x, y):  # (D,) each
    for d in range(len(y)):
        y[d] = x[d]


@inlined
def _store(row, y):  # (D,) each
    for d in range(len(y)):
        put(y, d, row[d])


@inlined
def rotate(row, cos, sin):  # (D,), (D/2,), (D/2,)
    half = len(cos)
    low, high = row[:half], row[half:]
    for i in range(half):
        a, b = low[i], high[i]
        low[i] = a * cos[i] - b * sin[i]
        high[i] = b * cos[i] + a * sin[i]


@inlined
def _rotate_back(row, cos, sin):  # (D,), (D/2,), (D/2,)
    half = len(cos)
    low, high = row[:half], row[half:]
    for i in range(half):
        a, b = low[i], high[i]
        low[i] = a * cos[i] + b * sin[i]
        high[i] = b * cos[i] - a * sin[i]


@inlined
def _dot(a, b):  # (D,) each
    total = ZERO
    for d in range(len(a)):
        total += a[d] * b[d]
    return total


@inlined
def _scale(row, r, w):  # (D,), scalar, (D,)
    for d in range(len(row)):
        row[d] = row[d] * r * wide(w[d])


@kernel
def _forward(qkv, wq, wk, eps, cos, sin, q, k, v, r):
    # qkv (B, T, H+2G, D); wq, wk (D,) or (0,); cos, sin (T, D/2) or (0, D/2); q (B, H, T, D); k, v (B, G, T, D)
    # r (B, T, H+G), used only with wq and wk
    (B, H, T, D), G = q.shape, k.shape[1]
    for part in prange(PARTS):
        row = np.empty(D, np.float32)
        for i in range(B * T * part // PARTS, B * T * (part + 1) // PARTS):
            b, t = i // T, i % T
            for h in range(H + G):
                _load(qkv[b, t, h], row)
                if len(wq) > 0:
                    r[b, t, h] = ONE / np.float32(sqrt(_dot(row, row) / np.float32(D) + eps))
                    _scale(row, r[b, t, h], wq if h < H else wk)
                if len(cos) > 0:
                    rotate(row, cos[t], sin[t])
                if h < H:
                    _store(row, q[b, h, t])
                else:
                    _store(row, k[b, h - H, t])
            for g in range(G):
                _copy(qkv[b, t, H + G + g], v[b, g, t])


@inlined
def _norm_backward(row, x, r, w, dw):  # row: dy in, dx out (D,); x (D,); w (D,); dw (D,)
    against = ZERO
    for d in range(len(row)):
        against += row[d] * wide(w[d]) * (wide(x[d]) * r)
    against = against / np.float32(len(row))
    for d in range(len(row)):
        n = wide(x[d]) * r
        dw[d] += row[d] * n
        row[d] = r * (row[d] * wide(w[d]) - n * against)


@kernel
def _backward(dq, dk, dv, qkv, wq, wk, r, cos, sin, dqkv, sums, dwq, dwk):
    # dq (B, H, T, D); dk, dv (B, G, T, D); qkv (B, T, H+2G, D), used only with wq and wk; dqkv (B, T, H+2G, D)
    # sums (2, PARTS, D); dwq, dwk (D,), or (0,)
    (B, H, T, D), G = dq.shape, dk.shape[1]
    for part in prange(PARTS):
        sums[:, part] = ZERO
        row = np.empty(D, np.float32)
        for i in range(B * T * part // PARTS, B * T * (part + 1) // PARTS):
            b, t = i // T, i % T
            for h in range(H + G):
                if h < H:
                    _load(dq[b, h, t], row)
                else:
                    _load(dk[b, h - H, t], row)
                if len(cos) > 0:
                    _rotate_back(row, cos[t], sin[t])  # mutant: rotate-back
                if len(wq) > 0:
                    w, which = (wq, 0) if h < H else (wk, 1)
                    _norm_backward(row, qkv[b, t, h], r[b, t, h], w, sums[which, part])
                _store(row, dqkv[b, t, h])
            for g in range(G):
                _copy(dv[b, g, t], dqkv[b, t, H + G + g])
    add_parts(sums[0], dwq)
    add_parts(sums[1], dwk)


def _norm_weights(wq_norm: Tensor | None, wk_norm: Tensor | None, like: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(D,) each, or (0,) without QK-norm."""
    if wq_norm is None or wk_norm is None:
        nothing = array(like).reshape(-1)[:0]
        return nothing, nothing
    return array(wq_norm), array(wk_norm)


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
    ws: Workspace,
) -> tuple[Tensor, Tensor, Tensor, QKVRopeSaved | None]:  # q (B, H, T, D), k (B, G, T, D), v (B, G, T, D)
    (B, T, width), H, G = qkv.shape, num_heads, num_kv_heads
    D = width // (H + 2 * G)
    q, k, v = (ws.empty((B, heads, T, D), qkv.dtype) for heads in (H, G, G))
    wq, wk = _norm_weights(wq_norm, wk_norm, q)
    r = torch.empty(B, T, H + G if len(wq) else 0, dtype=torch.float32, device=qkv.device)
    outputs = array(q), array(k), array(v), array(r)
    launch(_forward, matrix(qkv).reshape(B, T, -1, D), wq, wk, np.float32(eps), *_tables(T, D, theta, offset), *outputs)
    if not len(wq):
        return q, k, v, None
    rq, rk = (part.transpose(1, 2).unsqueeze(-1) for part in r.split([H, G], 2))
    return q, k, v, QKVRopeSaved(qkv, rq, rk)


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
    ws: Workspace,
) -> Tensor:  # dqkv (B, T, (H+2G)*D)
    (B, H, T, D), G = dq.shape, dk.shape[1]
    dqkv = ws.empty((B, T, (H + 2 * G) * D), dq.dtype)
    wq, wk = _norm_weights(wq_norm, wk_norm, dqkv)
    if saved is None:
        qkv, r = array(dq)[:0], NO_NORMS
    else:
        qkv = matrix(saved.qkv).reshape(B, T, -1, D)
        r = array(torch.cat([saved.rq, saved.rk], 1).squeeze(-1).transpose(1, 2).contiguous())  # (B, T, H+G)
    upstream = (array(x if x.is_contiguous() else x.contiguous()) for x in (dq, dk, dv))
    grads = (NO_GRAD if grad is None else array(grad) for grad in (dwq_norm, dwk_norm))
    heads, sums = array(dqkv).reshape(B, T, -1, D), np.empty((2, PARTS, D), np.float32)
    launch(_backward, *upstream, qkv, wq, wk, r, *_tables(T, D, theta, offset), heads, sums, *grads)
    return dqkv


def qkv_rope(ws: Workspace) -> Op:
    return QKV_ROPE._replace(forward=partial(qkv_rope_forward, ws=ws), backward=partial(qkv_rope_backward, ws=ws))
