"""Causal attention, a block of query rows at a time: the scores of a block stay in the cache, and nothing T x S is ever there.

Formulas: ops/attention.py. Forward, for each head: its keys transposed and its values, as float32, in buffers of the thread;
then for each block of BLOCK rows the scores of the keys it sees, the softmax row by row, the product with the values. Backward,
for each head of keys, the same blocks with p made again from lse:
    dv += p' do      dp = do v'      dz = p (dp - sum_D(do o))      dq = dz k / D^(1/2)      dk += dz' q / D^(1/2)
q is scaled when it is packed, which serves z and dk. One thread works on one head, so a sum has one order, however many
threads there are.
Judged by: tests/kernels/test_cpu.py."""

import math
from functools import partial

import numba
import numpy as np
import torch
from numba import prange
from torch import Tensor

from tapeless.kernels.cpu.functions import exp
from tapeless.kernels.cpu.jit import array, inlined, kernel, largest, put, wide
from tapeless.kernels.cpu.tile import ROWS, WIDTH, product
from tapeless.kernels.workspace import Workspace
from tapeless.ops.attention import AttentionSaved, require_matching_documents
from tapeless.ops.op import Op

BLOCK = 32  # query rows: more of them reuse the keys better, fewer waste less where the block crosses the diagonal
ZERO, ONE = np.float32(0), np.float32(1)


@inlined
def _up(n, to):
    return -(-n // to) * to


@inlined
def _pack(x, first, count, scale, packed, row):  # x (n, D); packed[:] (rows, row)
    """`count` rows from `first` on, as float32 times `scale`; zeros behind each, and in the rows that are missing."""
    n, D = x.shape
    for i in range(count):
        out = packed[i * row : (i + 1) * row]
        out[:] = ZERO
        if first + i < n:
            source = x[first + i]
            for d in range(D):
                out[d] = wide(source[d]) * scale


@inlined
def _pack_transposed(x, packed, row):  # x (n, D); packed[:] (D, row)
    n, D = x.shape
    packed[: D * row] = ZERO
    for i in range(n):
        source = x[i]
        for d in range(D):
            packed[d * row + i] = wide(source[d])


@inlined
def _exponentials(z, shift):  # (n,) in place; returns their sum
    total = ZERO
    for s in range(len(z)):
        z[s] = exp(z[s] - shift)
        total += z[s]
    return total


@inlined
def _hide_others(z, documents, own, value):  # (n,), (n,)
    for s in range(len(z)):
        if documents[s] != own:
            z[s] = value


@inlined
def _softmax_row(z, documents, own):  # (n,) in place: exponentials; returns their sum and the largest score
    if len(documents) == 0:
        top = largest(z)
        return _exponentials(z, top), top
    _hide_others(z, documents, own, np.float32(-np.inf))
    top = largest(z)
    _exponentials(z, top)
    _hide_others(z, documents, own, ZERO)
    total = ZERO
    for s in range(len(z)):
        total += z[s]
    return total, top


@inlined
def _unpack(row, factor, out):  # (D,), scalar, (D,)
    for d in range(len(out)):
        put(out, d, row[d] * factor)


@kernel
def _forward(q, k, v, documents, scale, keys, values, queries, scores, outputs, o, lse):
    # q (B, H, T, D); k, v (B, G, S, D); documents (B, T), or (0, 0); o (B, T, H, D); lse (B, H, T)
    # one row for each thread: keys, values (D_ S_), queries, outputs (BLOCK D_), scores (BLOCK S_)
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    D_, S_ = _up(D, WIDTH), _up(S, WIDTH)
    for unit in prange(B * H):
        b, h = unit // H, unit % H
        thread = numba.get_thread_id()
        kt, vs, qs, p, out = keys[thread], values[thread], queries[thread], scores[thread], outputs[thread]
        _pack_transposed(k[b, h * G // H], kt, S_)
        _pack(v[b, h * G // H], 0, S_, ONE, vs, D_)
        for first in range(0, T, BLOCK):
            count = min(BLOCK, T - first)
            M, seen = _up(count, ROWS), first + count + S - T
            _pack(q[b, h], first, M, scale, qs, D_)
            product(p, 0, S_, qs, 0, D_, 1, kt, 0, S_, M, _up(seen, WIDTH), D, False)
            for i in range(count):
                visible = first + i + S - T + 1
                mine = documents[b, :visible] if len(documents) > 0 else documents[:0].reshape(-1)
                own = documents[b, first + i] if len(documents) > 0 else 0
                total, top = _softmax_row(p[i * S_ : i * S_ + visible], mine, own)
                p[i * S_ + visible : i * S_ + seen] = ZERO
                lse[b, h, first + i] = top + np.float32(math.log(total))
            product(out, 0, D_, p, 0, S_, 1, vs, 0, D_, M, D_, seen, False)
            for i in range(count):
                visible = first + i + S - T + 1
                total = ZERO
                weights = p[i * S_ : i * S_ + visible]
                for s in range(visible):
                    total += weights[s]
                _unpack(out[i * D_ : i * D_ + D], ONE / total, o[b, first + i, h])


@inlined
def _row_gradient(p, dp, lse, against, documents, own):  # p: z in, p out (n,); dp: dp in, dz out (n,)
    for s in range(len(p)):
        p[s] = exp(p[s] - lse)
    if len(documents) > 0:
        _hide_others(p, documents, own, ZERO)
    for s in range(len(p)):
        dp[s] = p[s] * (dp[s] - against)


@inlined
def _dot(a, b):  # (D,) each
    total = ZERO
    for d in range(len(a)):
        total += wide(a[d]) * wide(b[d])
    return total


@kernel
def _backward(do, q, k, v, o, lse, documents, scale, keys, keys_t, values_t, blocks, scores, dkeys, dvalues, dq, dk, dv):
    # do, o (B, T, H, D); q, dq (B, H, T, D); k, v, dk, dv (B, G, S, D); documents (B, T), or (0, 0); lse (B, H, T)
    # one row for each thread: keys, keys_t, values_t, dkeys, dvalues (D_ S_), blocks (3, BLOCK D_), scores (2, BLOCK S_)
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    D_, S_, S8 = _up(D, WIDTH), _up(S, WIDTH), _up(S, ROWS)
    for unit in prange(B * G):
        b, g = unit // G, unit % G
        thread = numba.get_thread_id()
        ks, kt, vt, dks, dvs = keys[thread], keys_t[thread], values_t[thread], dkeys[thread], dvalues[thread]
        (qs, dos, dqs), (p, dp) = blocks[thread], scores[thread]
        _pack(k[b, g], 0, S_, ONE, ks, D_)
        _pack_transposed(k[b, g], kt, S_)
        _pack_transposed(v[b, g], vt, S_)
        dks[:] = ZERO
        dvs[:] = ZERO
        for h in range(g * (H // G), (g + 1) * (H // G)):
            for first in range(0, T, BLOCK):
                count = min(BLOCK, T - first)
                M, seen = _up(count, ROWS), first + count + S - T
                N = _up(seen, WIDTH)
                _pack(q[b, h], first, M, scale, qs, D_)
                _pack(do[b, :, h], first, M, ONE, dos, D_)
                product(p, 0, S_, qs, 0, D_, 1, kt, 0, S_, M, N, D, False)
                product(dp, 0, S_, dos, 0, D_, 1, vt, 0, S_, M, N, D, False)
                for i in range(M):
                    visible = first + i + S - T + 1 if i < count else 0
                    if i < count:
                        mine = documents[b, :visible] if len(documents) > 0 else documents[:0].reshape(-1)
                        own = documents[b, first + i] if len(documents) > 0 else 0
                        against = _dot(do[b, first + i, h], o[b, first + i, h])
                        row, drow = p[i * S_ : i * S_ + visible], dp[i * S_ : i * S_ + visible]
                        _row_gradient(row, drow, lse[b, h, first + i], against, mine, own)
                    p[i * S_ + visible : i * S_ + N] = ZERO
                    dp[i * S_ + visible : i * S_ + N] = ZERO
                product(dqs, 0, D_, dp, 0, S_, 1, ks, 0, D_, M, D_, seen, False)
                product(dvs, 0, D_, p, 0, 1, S_, dos, 0, D_, min(S8, N), D_, count, True)
                product(dks, 0, D_, dp, 0, 1, S_, qs, 0, D_, min(S8, N), D_, count, True)
                for i in range(count):
                    _unpack(dqs[i * D_ : i * D_ + D], scale, dq[b, h, first + i])
        for s in range(S):
            _unpack(dks[s * D_ : s * D_ + D], ONE, dk[b, g, s])
            _unpack(dvs[s * D_ : s * D_ + D], ONE, dv[b, g, s])


def _scratch(ws: Workspace, *shape: int) -> np.ndarray:  # (threads, *shape) float32
    return array(ws.empty((numba.get_num_threads(), *shape), torch.float32))


def _padded(n: int) -> int:
    return -(-n // WIDTH) * WIDTH


def _documents(documents: Tensor | None) -> np.ndarray:  # (B, T) or (0, 0)
    return array(torch.empty(0, 0, dtype=torch.int64) if documents is None else documents.contiguous())


def attention_forward(
    q: Tensor,  # (B, H, T, D)
    k: Tensor,  # (B, G, S, D)  S >= T; S > T when earlier keys come from a kv_cache
    v: Tensor,  # (B, G, S, D)
    documents: Tensor | None = None,  # (B, T) int64
    *,
    ws: Workspace,
) -> tuple[Tensor, AttentionSaved]:  # o (B, T, H*D)
    require_matching_documents(documents, q, k)
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    D_, S_ = _padded(D), _padded(S)
    o = ws.empty((B, T, H * D), q.dtype)
    lse = torch.empty(B, G, H // G, T, 1)
    _forward(
        *(array(x.contiguous()) for x in (q, k, v)),
        _documents(documents),
        np.float32(1 / math.sqrt(D)),
        *(_scratch(ws, size) for size in (D_ * S_, D_ * S_, BLOCK * D_, BLOCK * S_, BLOCK * D_)),
        array(o.view(B, T, H, D)),
        array(lse.view(B, H, T)),
    )
    return o, AttentionSaved(q, k, v, o, lse, documents)


def attention_backward(
    do: Tensor,  # (B, T, H*D)
    saved: AttentionSaved,
    *,
    ws: Workspace,
) -> tuple[Tensor, Tensor, Tensor]:  # dq (B, H, T, D), dk (B, G, S, D), dv (B, G, S, D)
    q, k, v, o, lse, documents = saved
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    D_, S_ = _padded(D), _padded(S)
    dq, dk, dv = ws.empty_like(q), ws.empty_like(k), ws.empty_like(v)
    _backward(
        array(do.contiguous().view(B, T, H, D)),
        *(array(x.contiguous()) for x in (q, k, v)),
        array(o.contiguous().view(B, T, H, D)),
        array(lse.view(B, H, T)),
        _documents(documents),
        np.float32(1 / math.sqrt(D)),
        *(_scratch(ws, D_ * S_) for _ in range(3)),
        _scratch(ws, 3, BLOCK * D_),
        _scratch(ws, 2, BLOCK * S_),
        *(_scratch(ws, D_ * S_) for _ in range(2)),
        *(array(x) for x in (dq, dk, dv)),
    )
    return dq, dk, dv


def attention(ws: Workspace) -> Op:
    return Op(partial(attention_forward, ws=ws), partial(attention_backward, ws=ws))
