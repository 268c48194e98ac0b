"""Causal attention, a block of query rows at a time: the scores of a block stay in the cache, and nothing T x S is ever there.

Formulas: ops/attention.py. Forward, for each head: its keys transposed and its values, as float32, in buffers of the thread;
then for each block of BLOCK rows the scores of the keys it sees, the softmax row by row, the product with the values. Backward,
for each head of keys, the same blocks with p made again from lse:
    dv += p' do      dp = do v'      dz = p (dp - sum_s(dp p))      dq = dz k / D^(1/2)      dk += dz' q / D^(1/2)
q is scaled when it is packed, which serves z and dk. sum_s(dp p) is taken from the very p and dp that it is subtracted from, not
from do and o: where a softmax is nearly one-hot the two almost cancel, and the rounding of o would be most of what is left. One thread works on one head, so a sum has one order, however many
threads there are.
Judged by: tests/kernels/test_cpu.py."""

import math
from functools import partial

import numba
import numpy as np
import torch
from numba import prange
from torch import Tensor

from tapeless.kernels.cpu.jit import array, bare, inlined, kernel, put, wide
from tapeless.kernels.cpu.rows import softmax_row, softmax_row_backward
from tapeless.kernels.cpu.tile import ROWS, WIDTH, product
from tapeless.kernels.workspace import Workspace
from tapeless.ops.attention import AttentionSaved, require_matching_documents
from tapeless.ops.op import Op

BLOCK = 32  # query rows: more of them reuse the keys better, fewer waste less where the block crosses the diagonal
ZERO, ONE = np.float32(0), np.float32(1)
LOWEST = np.float32(-1e30)  # of another document: its exponential adds nothing to a sum, and becomes zero afterwards


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
def _mask(flat, at, documents, own, value):  # flat[at:] (n,), documents (n,)
    row = flat[at : at + len(documents)]
    for s in range(len(documents)):
        if documents[s] != own:
            row[s] = value


@inlined
def _unpack(row, factor, out):  # (D,), scalar, (D,)
    for d in range(len(out)):
        put(out, d, row[d] * factor)


@kernel
def _forward(q, k, v, documents, scale, keys, values, queries, scores, outputs, o, lse):
    # q (B, H, T, D); k, v (B, G, S, D); documents (B, T), or (0, 0); o (B, T, H, D); lse (B, H, T)
    # one row for each thread: keys, values (D_ S_), queries (BLOCK D_), outputs (BLOCK (D_ + 1)), scores (BLOCK S_)
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    D_, S_ = _up(D, WIDTH), _up(S, WIDTH)
    nobody = documents.reshape(-1)[:0]
    for unit in prange(B * H):
        b, h = unit // H, unit % H
        thread = numba.get_thread_id()
        kt, vs, qs = bare(keys[thread]), bare(values[thread]), bare(queries[thread])
        p, out, sums = bare(scores[thread]), bare(outputs[thread]), bare(outputs[thread, BLOCK * D_ :])
        _pack_transposed(k[b, h * G // H], kt, S_)
        _pack(v[b, h * G // H], 0, S_, ONE, vs, D_)
        for first in range(0, T, BLOCK):
            count = min(BLOCK, T - first)
            M, seen = _up(count, ROWS), first + count + S - T
            N = _up(seen, WIDTH)
            _pack(q[b, h], first, M, scale, qs, D_)
            product(p, 0, S_, qs, 0, D_, 1, kt, 0, S_, M, N, D, False)
            for i in range(count):
                visible = first + i + S - T + 1
                mine = documents[b, :visible] if len(documents) > 0 else nobody
                own = mine[first + i] if len(documents) > 0 else 0
                _mask(p, i * S_, mine, own, LOWEST)
                total, top = softmax_row(p, i * S_, N, visible)
                _mask(p, i * S_, mine, own, ZERO)
                lse[b, h, first + i] = top + np.float32(math.log(total))
                sums[i] = total
            product(out, 0, D_, p, 0, S_, 1, vs, 0, D_, M, D_, seen, False)
            for i in range(count):
                _unpack(out[i * D_ : i * D_ + D], ONE / sums[i], o[b, first + i, h])


@kernel
def _backward(do, q, k, v, lse, documents, scale, keys, keys_t, values_t, blocks, scores, dkeys, dvalues, dq, dk, dv):
    # do (B, T, H, D); q, dq (B, H, T, D); k, v, dk, dv (B, G, S, D); documents (B, T), or (0, 0); lse (B, H, T)
    # one row for each thread: keys, keys_t, values_t, dkeys, dvalues (D_ S_), blocks (3, BLOCK D_), scores (2, BLOCK S_)
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    D_, S_ = _up(D, WIDTH), _up(S, WIDTH)
    nobody = documents.reshape(-1)[:0]
    for unit in prange(B * G):
        b, g = unit // G, unit % G
        thread = numba.get_thread_id()
        ks, kt, vt = bare(keys[thread]), bare(keys_t[thread]), bare(values_t[thread])
        dks, dvs = bare(dkeys[thread]), bare(dvalues[thread])
        qs, dos, dqs = bare(blocks[thread, 0]), bare(blocks[thread, 1]), bare(blocks[thread, 2])
        p, dp = bare(scores[thread, 0]), bare(scores[thread, 1])
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
                    mine = documents[b, :visible] if len(documents) > 0 else nobody
                    own = mine[first + i] if len(mine) > 0 else 0
                    _mask(p, i * S_, mine, own, LOWEST)
                    softmax_row_backward(p, dp, i * S_, N, visible, lse[b, h, min(first + i, T - 1)])
                    _mask(p, i * S_, mine, own, ZERO)
                    _mask(dp, i * S_, mine, own, ZERO)
                product(dqs, 0, D_, dp, 0, S_, 1, ks, 0, D_, M, D_, seen, False)
                product(dvs, 0, D_, p, 0, 1, S_, dos, 0, D_, _up(seen, ROWS), D_, count, True)
                product(dks, 0, D_, dp, 0, 1, S_, qs, 0, D_, _up(seen, ROWS), D_, count, True)
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
        *(_scratch(ws, size) for size in (D_ * S_, D_ * S_, BLOCK * D_, BLOCK * S_, BLOCK * (D_ + 1))),
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
    q, k, v, _, lse, documents = saved
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    D_, S_ = _padded(D), _padded(S)
    dq, dk, dv = ws.empty_like(q), ws.empty_like(k), ws.empty_like(v)
    _backward(
        array(do.contiguous().view(B, T, H, D)),
        *(array(x.contiguous()) for x in (q, k, v)),
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
