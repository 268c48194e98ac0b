"""One more token of each of several sequences through the whole model, in one call: the inner loop of generation.

A token is one row, so a linear map is a matrix-vector product and costs as much as reading the matrix. The rest is the overhead
of calling ops, which is paid once per token here instead of ten times per layer. Parameters are read from the flat buffer
through a table of offsets. Activations stay in float32 from the embedding to the logits.
Same formulas, same order as model/block.py. Tested by: tests/kernels/test_cpu.py."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from tapeless.config import DEFAULT_BLOCKS
from tapeless.kernels.cpu.ffn_down import KINDS, gated_row, plain_row
from tapeless.kernels.cpu.functions import exp
from tapeless.kernels.cpu.jit import array, compiled, inlined, kernel, put, wide
from tapeless.kernels.cpu.qkv_rope import rotate
from tapeless.ops.ffn_gate import GATED

# Columns of the table, one row per layer: offsets into the flat buffer, or -1 for a parameter that does not exist.
FIELDS = [f"{part}_norm.{x}" for part in ("attn", "ffn") for x in "wb"]
FIELDS += ["attn.wq", "attn.bq", "attn.q_norm.w", "attn.k_norm.w", "attn.wo", "attn.bo"]
FIELDS += ["ffn.w_up", "ffn.b_up", "ffn.w_down", "ffn.b_down"]
ATTN_W, ATTN_B, FFN_W, FFN_B, QKV, QKV_B, Q_NORM, K_NORM, WO, WO_B, UP, UP_B, DOWN, DOWN_B = range(14)
ENDS = ("embed.w", "pos.w", "final_norm.w", "final_norm.b")  # likewise, once per model; then the head
EMBED, POSITIONS, FINAL_W, FINAL_B, HEAD = range(5)
SMALL = 2**16  # elements of a matrix that one thread reads faster than two can be started
ZERO, ONE = np.float32(0), np.float32(1)


@inlined
def _dot(w, x):  # (I,) each
    total = ZERO
    for i in range(len(x)):
        total += wide(w[i]) * x[i]
    return total


@inlined
def _row_times(flat, at, bias, o, x, y):  # row o of the matrix at `at`; x (B, I); y (B, O)
    row = flat[at + o * x.shape[1] : at + (o + 1) * x.shape[1]]
    for b in range(len(x)):
        y[b, o] = _dot(row, x[b]) + (wide(flat[bias + o]) if bias >= 0 else ZERO)


@kernel
def _times(flat, at, bias, x, y):  # y (B, O) = x (B, I) w' + bias
    O = y.shape[1]
    if O * x.shape[1] < SMALL:
        for o in range(O):
            _row_times(flat, at, bias, o, x, y)
    else:
        for o in prange(O):
            _row_times(flat, at, bias, o, x, y)


@inlined
def _norm(x, flat, w, b, centre, eps, y):  # (B, C) -> y (B, C)
    B, C = x.shape
    for n in range(B):
        row, mean, squares = x[n], ZERO, ZERO
        if centre:
            for c in range(C):
                mean += row[c]
            mean /= np.float32(C)
        for c in range(C):
            squares += (row[c] - mean) * (row[c] - mean)
        r = ONE / np.float32(math.sqrt(squares / np.float32(C) + eps))
        for c in range(C):
            y[n, c] = (row[c] - mean) * r * wide(flat[w + c]) + (wide(flat[b + c]) if b >= 0 else ZERO)


@inlined
def _head_norm(row, flat, w, eps):  # (D,) in place
    squares = ZERO
    for d in range(len(row)):
        squares += row[d] * row[d]
    r = ONE / np.float32(math.sqrt(squares / np.float32(len(row)) + eps))
    for d in range(len(row)):
        row[d] = row[d] * r * wide(flat[w + d])


@inlined
def _attend(q, keys, values, count, out):  # q, out (D,); keys, values (capacity, D), the first `count` of them
    D = len(q)
    scores = np.empty(count, np.float32)
    scale = ONE / np.float32(math.sqrt(D))
    top = np.float32(-np.inf)
    for s in range(count):
        scores[s] = _dot(keys[s], q) * scale
        top = max(top, scores[s])
    out[:] = ZERO
    total = ZERO
    for s in range(count):
        e, row = exp(scores[s] - top), values[s]
        total += e
        for d in range(D):
            out[d] += e * wide(row[d])
    for d in range(D):
        out[d] /= total


@inlined
def _gate(kind, up, h):  # (2F,) or (F,) -> h (F,)
    F = len(h)
    if len(up) > F:
        gated_row(kind, up[:F], up[F:], h)
    else:
        plain_row(kind, up, h)


@inlined
def _attention(n, flat, at, keys, values, slots, positions, H, turns, cos, sin, eps, a):
    # n, a (B, C); keys, values (slots, G, S, D); slots, positions (B,); cos, sin (B, D/2)
    B, (G, D) = len(n), (keys.shape[1], keys.shape[3])
    qkv, out = np.empty((B, (H + 2 * G) * D), np.float32), np.empty((B, H * D), np.float32)
    _times(flat, at[QKV], at[QKV_B], n, qkv)
    for b in range(B):
        for h in range(H + G):
            row = qkv[b, h * D : (h + 1) * D]
            if at[Q_NORM] >= 0:
                _head_norm(row, flat, at[Q_NORM] if h < H else at[K_NORM], eps)
            if turns:
                rotate(row, cos[b], sin[b])
        slot, position = slots[b], positions[b]
        for g in range(G):
            for d in range(D):
                put(keys[slot, g, position], d, qkv[b, (H + g) * D + d])
                put(values[slot, g, position], d, qkv[b, (H + G + g) * D + d])
        for h in range(H):
            g = h * G // H
            _attend(qkv[b, h * D : (h + 1) * D], keys[slot, g], values[slot, g], position + 1, out[b, h * D : (h + 1) * D])
    _times(flat, at[WO], at[WO_B], out, a)


@inlined
def _feed_forward(n, flat, at, kind, up_width, F, f):  # n, f (B, C)
    B = len(n)
    up, h = np.empty((B, up_width), np.float32), np.empty((B, F), np.float32)
    _times(flat, at[UP], at[UP_B], n, up)
    for b in range(B):
        _gate(kind, up[b], h[b])
    _times(flat, at[DOWN], at[DOWN_B], h, f)


@compiled
def _decode(
    tokens, slots, positions, flat, layers, ends, keys, values, C, H, F, up_width, kind, theta, centre, post, eps, logits
):  # tokens, slots, positions (B,); flat (n,); layers (L, 14) and ends (5,) offsets; keys, values (L, slots, G, S, D)
    B, D = len(tokens), keys.shape[4]  # logits (B, V)
    x, n, y = np.empty((B, C), np.float32), np.empty((B, C), np.float32), np.empty((B, C), np.float32)
    cos, sin = np.empty((B, D // 2), np.float32), np.empty((B, D // 2), np.float32)
    for i in range(D // 2):
        frequency = theta ** (-2.0 * i / D)
        for b in range(B):
            cos[b, i], sin[b, i] = math.cos(positions[b] * frequency), math.sin(positions[b] * frequency)
    for b in range(B):
        for c in range(C):
            x[b, c] = wide(flat[ends[EMBED] + tokens[b] * C + c])
            if ends[POSITIONS] >= 0:
                x[b, c] += wide(flat[ends[POSITIONS] + positions[b] * C + c])
    for layer in range(len(layers)):
        at = layers[layer]
        if post:
            _attention(x, flat, at, keys[layer], values[layer], slots, positions, H, theta > 0, cos, sin, eps, y)
            x += y
            _norm(x, flat, at[ATTN_W], at[ATTN_B], centre, eps, n)
            _feed_forward(n, flat, at, kind, up_width, F, y)
            n += y
            _norm(n, flat, at[FFN_W], at[FFN_B], centre, eps, x)
        else:
            _norm(x, flat, at[ATTN_W], at[ATTN_B], centre, eps, n)
            _attention(n, flat, at, keys[layer], values[layer], slots, positions, H, theta > 0, cos, sin, eps, y)
            x += y
            _norm(x, flat, at[FFN_W], at[FFN_B], centre, eps, n)
            _feed_forward(n, flat, at, kind, up_width, F, y)
            x += y
    _norm(x, flat, ends[FINAL_W], ends[FINAL_B], centre, eps, n)
    _times(flat, ends[HEAD], -1, n, logits)


def decoder(
    config: Any,  # a ModelConfig
    spans: Mapping[str, tuple[int, int]],  # parameter -> where it lies in the flat buffer, and its size
    flat: Tensor,  # (n,) the parameters that matmuls read
) -> Callable[[Tensor, Tensor, Tensor, Any], Tensor] | None:
    """See OpSet.decoder; None for blocks other than attention and feed-forward that are alike in all layers."""
    c = config
    if c.blocks != DEFAULT_BLOCKS:
        return None

    def offset(name: str) -> int:
        return spans[name][0] if name in spans else -1

    def field(layer: int, name: str) -> int:
        if name in ("ffn.w_up", "ffn.b_up"):  # gate and up are one matrix, the gate first
            joined = offset(f"blocks.{layer}.{name.replace('_up', '_gate')}")
            return joined if joined >= 0 else offset(f"blocks.{layer}.{name}")
        return offset(f"blocks.{layer}.{name}")

    layers = np.array([[field(i, name) for name in FIELDS] for i in range(c.num_layers)], dtype=np.int64)
    head = offset("embed.w" if c.tie_embeddings else "head.w")
    ends = np.array([*(offset(name) for name in ENDS), head], dtype=np.int64)
    theta = float(c.rope_theta) if c.position == "rope" else 0.0
    F = c.intermediate_dim
    sizes = (c.hidden_dim, c.num_heads, F, 2 * F if c.ffn in GATED else F, KINDS[c.ffn])
    scalars = (*sizes, theta, c.norm == "layer", c.norm_placement == "post")

    def decode(tokens: Tensor, slots: Tensor, positions: Tensor, kv_cache: Any) -> Tensor:  # (B,) int64 each -> (B, V)
        logits = torch.empty(len(tokens), c.vocab_size, dtype=torch.float32, device="cpu")
        _decode(
            array(tokens),
            array(slots),
            array(positions),
            array(flat),
            layers,
            ends,
            array(kv_cache.stacked["keys"][0]),
            array(kv_cache.stacked["values"][0]),
            *scalars,
            np.float32(c.norm_eps),
            array(logits),
        )
        return logits.to(flat.dtype)

    return decode
