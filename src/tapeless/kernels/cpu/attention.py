"""Causal attention, in blocks of query rows: the scores of a block stay in the cache, and nothing of size T x S is allocated.

Formulas: ops/attention.py. Forward, for each head: its keys transposed and its values packed into buffers of the thread; then
for each block of BLOCK rows the scores of its visible keys, the softmax row by row, the matmul with the values. Backward, for
each key head, the same blocks with p recomputed from lse:
    dv += p' do      dp = do v'      dz = p (dp - sum_s(dp p))      dq = dz k / D^(1/2)      dk += dz' q / D^(1/2)
sum_s(dp p) is computed from the same p and dp that it is subtracted from, not from do and o: if a softmax is nearly one-hot the
two almost cancel, and the rounding of o would dominate the difference. One thread works on one head, so the order of a sum does
not depend on the number of threads.
Tested by: tests/kernels/test_cpu.py."""

import math
from functools import partial

import numba
import numpy as np
import torch
from numba import prange
from torch import Tensor

from tapeless.kernels.cpu.capture import launch
from tapeless.kernels.cpu.jit import array, bare, inlined, kernel, put
from tapeless.kernels.cpu.packing import left, right, right_transposed, scores_left, scores_transposed, steps
from tapeless.kernels.cpu.rows import softmax_row, softmax_row_backward
from tapeless.kernels.cpu.tile import HAS_PAIRS, ROWS, WIDTH, tile_matmul
from tapeless.kernels.workspace import Workspace
from tapeless.ops.attention import ATTENTION, AttentionSaved, require_matching_documents
from tapeless.ops.op import Op

BLOCK = 32  # query rows: more reuse the keys better, fewer waste less where the block crosses the diagonal
ZERO, ONE = np.float32(0), np.float32(1)
LOWEST = np.float32(-1e30)  # score of a key in another document: its exponential adds nothing to a sum, and is then set to zero


@inlined
def _up(n, to):
    """The next multiple."""
    return -(-n // to) * to


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
def _forward(q, k, v, documents, scale, operands, blocks, weights, scores, outputs, o, lse):
    # q (B, H, T, D); k, v (B, G, S, D), elements or words; documents (B, T), or (0, 0); o (B, T, H, D); lse (B, H, T)
    # one row for each thread: operands (3, D_ S_), blocks (4, BLOCK D_), weights (BLOCK S_), scores (2, BLOCK S_),
    # outputs (BLOCK (D_ + 1)); not all of them are used here
    (B, H, T), (G, S), D = q.shape[:3], k.shape[1:3], o.shape[3]
    D_, S_ = _up(D, WIDTH), _up(S, WIDTH)
    no_keys = documents.reshape(-1)[:0]
    for unit in prange(B * H):
        b, h = unit // H, unit % H
        thread = numba.get_thread_id()
        kt, vs, qs, ps = bare(operands[thread, 0]), bare(operands[thread, 1]), bare(blocks[thread, 0]), bare(weights[thread])
        p, out, sums = bare(scores[thread, 0]), bare(outputs[thread]), bare(outputs[thread, BLOCK * D_ :])
        right_transposed(k[b, h * G // H], kt, S_)
        right(v[b, h * G // H], 0, S_, vs, D_)
        for first in range(0, T, BLOCK):
            count = min(BLOCK, T - first)
            M, seen = _up(count, ROWS), first + count + S - T
            N = _up(seen, WIDTH)
            left(q[b, h], first, M, qs, D_)
            tile_matmul(p, 0, S_, qs, 0, D_, 1, kt, 0, S_, M, N, steps(kt, D), False)
            for i in range(count):
                visible = first + i + S - T + 1
                ids = documents[b, :visible] if len(documents) > 0 else no_keys
                own = ids[first + i] if len(documents) > 0 else 0
                _mask(p, i * S_, ids, own, LOWEST)
                total, top = softmax_row(p, i * S_, N, visible, scale)
                _mask(p, i * S_, ids, own, ZERO)
                lse[b, h, first + i] = top + np.float32(math.log(total))
                sums[i] = total
            weighted = scores_left(ps, p, count, N, S_)
            tile_matmul(out, 0, D_, weighted, 0, steps(ps, S_), 1, vs, 0, D_, M, D_, steps(vs, seen), False)
            for i in range(count):
                _unpack(out[i * D_ : i * D_ + D], ONE / sums[i], o[b, first + i, h])


@kernel
def _backward(do, q, k, v, lse, documents, scale, operands, blocks, weights, scores, dqueries, dkeys, dvalues, dq, dk, dv):
    # do (B, T, H, D); q (B, H, T, D); k, v (B, G, S, D), elements or words; dq, dk, dv like q, k, v; lse (B, H, T)
    # one row for each thread: operands (3, D_ S_), blocks (4, BLOCK D_), weights (BLOCK S_), scores (2, BLOCK S_),
    # dqueries (BLOCK D_), dkeys, dvalues (D_ S_); documents (B, T), or (0, 0)
    (B, H, T), (G, S), D = q.shape[:3], k.shape[1:3], dq.shape[3]
    D_, S_ = _up(D, WIDTH), _up(S, WIDTH)
    no_keys = documents.reshape(-1)[:0]
    for unit in prange(B * G):
        b, g = unit // G, unit % G
        thread = numba.get_thread_id()
        ks, kt, vt = bare(operands[thread, 0]), bare(operands[thread, 1]), bare(operands[thread, 2])
        qs, dos, ps = bare(blocks[thread, 0]), bare(blocks[thread, 1]), bare(weights[thread])
        q_rows, do_rows = bare(blocks[thread, 2]), bare(blocks[thread, 3])
        p, dp = bare(scores[thread, 0]), bare(scores[thread, 1])
        dqs, dks, dvs = bare(dqueries[thread]), bare(dkeys[thread]), bare(dvalues[thread])
        right(k[b, g], 0, S_, ks, D_)
        right_transposed(k[b, g], kt, S_)
        right_transposed(v[b, g], vt, S_)
        dks[:] = ZERO
        dvs[:] = ZERO
        for h in range(g * (H // G), (g + 1) * (H // G)):
            for first in range(0, T, BLOCK):
                count = min(BLOCK, T - first)
                M, seen = _up(count, ROWS), first + count + S - T
                N = _up(seen, WIDTH)
                left(q[b, h], first, M, qs, D_)
                left(do[b, :, h], first, M, dos, D_)
                right(q[b, h], first, M, q_rows, D_)
                right(do[b, :, h], first, M, do_rows, D_)
                tile_matmul(p, 0, S_, qs, 0, D_, 1, kt, 0, S_, M, N, steps(kt, D), False)
                tile_matmul(dp, 0, S_, dos, 0, D_, 1, vt, 0, S_, M, N, steps(vt, D), False)
                for i in range(M):
                    visible = first + i + S - T + 1 if i < count else 0
                    ids = documents[b, :visible] if len(documents) > 0 else no_keys
                    own = ids[first + i] if len(ids) > 0 else 0
                    _mask(p, i * S_, ids, own, LOWEST)
                    softmax_row_backward(p, dp, i * S_, N, visible, scale, lse[b, h, min(first + i, T - 1)])
                    _mask(p, i * S_, ids, own, ZERO)
                    _mask(dp, i * S_, ids, own, ZERO)
                keys_seen, rows = _up(seen, ROWS), steps(ps, M)
                dz = scores_left(ps, dp, M, N, S_)
                tile_matmul(dqs, 0, D_, dz, 0, steps(ps, S_), 1, ks, 0, D_, M, D_, steps(ks, seen), False)
                tile_matmul(dks, 0, D_, scores_transposed(ps, dp, M, N, S_), 0, 1, S_, q_rows, 0, D_, keys_seen, D_, rows, True)
                tile_matmul(dvs, 0, D_, scores_transposed(ps, p, M, N, S_), 0, 1, S_, do_rows, 0, D_, keys_seen, D_, rows, True)
                for i in range(count):
                    _unpack(dqs[i * D_ : i * D_ + D], scale, dq[b, h, first + i])
        for s in range(S):
            _unpack(dks[s * D_ : s * D_ + D], scale, dk[b, g, s])
            _unpack(dvs[s * D_ : s * D_ + D], ONE, dv[b, g, s])


NO_DOCUMENTS = np.empty((0, 0), np.int64)


def _operand(x: Tensor) -> np.ndarray:
    """Elements, or words of two bfloat16 if the processor multiplies such pairs."""
    elements = array(x if x.is_contiguous() else x.contiguous())
    pairs = HAS_PAIRS and x.dtype == torch.bfloat16 and x.shape[-1] % 2 == 0 and not x.is_meta
    return elements.view(np.int32) if pairs else elements


def _documents(documents: Tensor | None) -> np.ndarray:  # (B, T), or (0, 0)
    return NO_DOCUMENTS if documents is None else array(documents.contiguous())


def _scratch(ws: Workspace, queries: np.ndarray, S: int, D: int) -> tuple[np.ndarray, ...]:
    """What both kernels take: operands, blocks, weights, scores and outputs, with a row for each thread."""
    D_, S_, threads = _up.py_func(D, WIDTH), _up.py_func(S, WIDTH), numba.get_num_threads()
    kind = np.int32 if queries.dtype == np.int32 else np.float32
    return (
        ws.scratch("operands", threads, 3, S_ * D_).view(kind),
        ws.scratch("blocks", threads, 4, BLOCK * D_).view(kind),
        ws.scratch("weights", threads, BLOCK * S_).view(kind),
        ws.scratch("scores", threads, 2, BLOCK * S_),
        ws.scratch("outputs", threads, BLOCK * (D_ + 1)),
    )


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
    o = ws.empty((B, T, H * D), q.dtype)
    lse = torch.empty(B, G, H // G, T, 1, dtype=torch.float32, device=q.device)
    inputs = _operand(q), _operand(k), _operand(v), _documents(documents), np.float32(1 / math.sqrt(D))
    outputs = array(o).reshape(B, T, H, D), array(lse).reshape(B, H, T)
    launch(_forward, *inputs, *_scratch(ws, inputs[0], S, D), *outputs)
    return o, AttentionSaved(q, k, v, o, lse, documents)


def attention_backward(
    do: Tensor,  # (B, T, H*D)
    saved: AttentionSaved,
    *,
    ws: Workspace,
) -> tuple[Tensor, Tensor, Tensor]:  # dq (B, H, T, D), dk (B, G, S, D), dv (B, G, S, D)
    q, k, v, _, lse, documents = saved
    (B, H, T, D), S = q.shape, k.shape[2]
    dq, dk, dv = ws.empty(q.shape, q.dtype), ws.empty(k.shape, k.dtype), ws.empty(v.shape, v.dtype)
    inputs = _operand(do.reshape(B, T, H, D)), _operand(q), _operand(k), _operand(v), array(lse).reshape(B, H, T)
    scratch = _scratch(ws, inputs[1], S, D)
    threads, _, size = scratch[0].shape
    sums = ws.scratch("dkeys", threads, size), ws.scratch("dvalues", threads, size)
    scale = np.float32(1 / math.sqrt(D))
    launch(_backward, *inputs, _documents(documents), scale, *scratch, *sums, array(dq), array(dk), array(dv))
    return dq, dk, dv


def attention(ws: Workspace) -> Op:
    return ATTENTION._replace(forward=partial(attention_forward, ws=ws), backward=partial(attention_backward, ws=ws))
