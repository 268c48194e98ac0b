"""One more token of each of several sequences through the whole model, in one call: the inner loop of generation.

For one sequence a linear map costs as much as reading its matrix; the overhead of calling ops is paid once per token instead of
ten times per layer. Several sequences read each matrix once. A call is a list of phases, which all threads go through
together; a piece of a phase is a row, a span of outputs, or a row's heads that share keys. Parameters are read from the flat
buffer at offsets. Inputs of linear maps are rounded to the dtype of the matrices, as in training; all else is float32.
A row's bits depend on its own sequence alone: each number is computed by the same instructions in the same order, whatever the
other rows, and whichever thread does it.
Same formulas, same order as model/block.py. Tested by: tests/kernels/cpu/test_cpu_decode.py."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numba
import numpy as np
import torch
from numba import prange
from torch import Tensor

from tapeless.config import DEFAULT_BLOCKS
from tapeless.kernels.cpu.dot_tile import prefetch, rows_times, weighted_sum
from tapeless.kernels.cpu.ffn_down import KINDS, gated_row, plain_row
from tapeless.kernels.cpu.functions import exp
from tapeless.kernels.cpu.jit import array, bare, inlined, kernel, put, wide
from tapeless.kernels.cpu.phases import claim, finish, new_turns, wait
from tapeless.kernels.cpu.qkv_rope import rotate
from tapeless.kernels.cpu.tile import WIDTH
from tapeless.ops.ffn_gate import GATED

EMBED, NORM, ATTEND, QKV, OUT, UP, DOWN, HEAD = range(8)  # kinds of phases
PIECES = 64  # of a matmul, so that threads can share it, but not smaller ones than:
LEAST = 2**14  # elements of a matrix
PER_THREAD = 2**20  # multiplications; with fewer, starting another thread takes longer than its work
ZERO, ONE, NEGATIVE = np.float32(0), np.float32(1), np.float32(-np.inf)


@inlined
def _embed(token, position, flat, embed, positions, frequencies, x, cos, sin):  # x (C,); frequencies, cos, sin (D/2,)
    C = len(x)
    row = flat[embed + token * C : embed + (token + 1) * C]  # slices: an index that may be negative is not vectorised
    for c in range(C):
        x[c] = wide(row[c])
    if positions >= 0:
        row = flat[positions + position * C : positions + (position + 1) * C]
        for c in range(C):
            x[c] += wide(row[c])
    for i in range(len(frequencies)):
        cos[i], sin[i] = math.cos(position * frequencies[i]), math.sin(position * frequencies[i])


@inlined
def _norm(x, flat, w, b, centre, eps, n):  # (C,) -> n (C,)
    C, mean, squares = len(x), ZERO, ZERO
    if centre:
        for c in range(C):
            mean += x[c]
        mean /= np.float32(C)
    for c in range(C):
        squares += (x[c] - mean) * (x[c] - mean)
    r = ONE / np.float32(math.sqrt(squares / np.float32(C) + eps))
    weight = flat[w : w + C]
    for c in range(C):
        n[c] = (x[c] - mean) * r * wide(weight[c])
    if b >= 0:
        bias = flat[b : b + C]
        for c in range(C):
            n[c] += wide(bias[c])


@inlined
def _head_norm(head, flat, w, eps):  # (D,) in place
    squares = ZERO
    for d in range(len(head)):
        squares += head[d] * head[d]
    r = ONE / np.float32(math.sqrt(squares / np.float32(len(head)) + eps))
    weight = flat[w : w + len(head)]
    for d in range(len(head)):
        head[d] = head[d] * r * wide(weight[d])


@inlined
def _store(x, y):  # of equal length
    for i in range(len(x)):
        put(y, i, x[i])


@inlined
def _softmax(scores, scale):  # (S,) in place, but for the division by the sum, which is returned
    S, total = len(scores), ZERO
    top, second, third, fourth = NEGATIVE, NEGATIVE, NEGATIVE, NEGATIVE
    for s in range(0, S - 3, 4):  # four chains: a comparison waits for the one before
        top, second = max(top, scores[s]), max(second, scores[s + 1])
        third, fourth = max(third, scores[s + 2]), max(fourth, scores[s + 3])
    for s in range(S - S % 4, S):
        top = max(top, scores[s])
    top = max(max(top, second), max(third, fourth)) * scale
    for s in range(S):
        scores[s] = exp(scores[s] * scale - top)
    for s in range(S):
        total += scores[s]
    return total


@inlined
def _heads(qkv, flat, q_norm, k_norm, keys, values, at, position, coming, H, G, g, D, cos, sin, eps, scores, found, out):
    # The query heads that share key head g. qkv ((H+2G)D,); keys, values flat, those of the sequence and head from `at` on
    # coming: where the next head's keys are, and how many; cos, sin (D/2,), or (0,); scores, found: room; out (HD,)
    shared, end, S = H // G, at + position * D, position + 1
    for head in range(g * shared, (g + 1) * shared + 1):
        i = head if head < (g + 1) * shared else H + g  # the last one is the key
        row = qkv[i * D : (i + 1) * D]
        if q_norm >= 0:
            _head_norm(row, flat, q_norm if i < H else k_norm, eps)
        if len(cos) > 0:
            rotate(row, cos, sin)
    _store(qkv[(H + g) * D : (H + g + 1) * D], keys[end : end + D])
    _store(qkv[(H + G + g) * D : (H + G + g + 1) * D], values[end : end + D])
    # Sequences are short streams, which the processor does not foresee: what comes next is asked for during the arithmetic.
    prefetch(values, at, S * D)
    stride, scale = S + WIDTH, ONE / np.float32(math.sqrt(D))
    rows_times(scores, 0, stride, keys, at, qkv, g * shared * D, D, shared, S, D, True)
    prefetch(keys, coming[0], coming[1] * D)
    for j in range(shared):
        weights, i = scores[j * stride : j * stride + S], g * shared + j
        total = _softmax(weights, scale)
        for d in range(0, D, WIDTH):
            count = min(WIDTH, D - d)
            weighted_sum(found, weights, values, at + d, D, S, count)
            part = out[i * D + d : i * D + d + count]
            for k in range(count):
                put(part, k, found[k] / total)


@inlined
def _add_norm(x, y, flat, w, b, adds, replaces, centre, eps, n):  # (C,) each
    """n = norm(x), or x itself without w. adds: y to x before. replaces: x by n after, if the norm is that of the sum. y is
    overwritten."""
    C = len(x)
    if adds:
        for c in range(C):
            x[c] += y[c]
    if w >= 0:
        _norm(x, flat, w, b, centre, eps, y)
    else:
        y[:] = x
    if replaces:
        x[:] = y
    _store(y, n)


@inlined
def _outputs(x, flat, w, b, R, I, O, parts, first, count, y):  # x flat (R, I); y flat (parts, R, count + WIDTH)
    """Some outputs of `parts` matrices (O, I), one after the other at w, and of their biases at b."""
    stride = count + WIDTH
    for part in range(parts):
        o, y0 = part * O + first, part * R * stride
        rows_times(y, y0, stride, flat, w + o * I, x, 0, I, R, count, I, False)
        if b >= 0:
            bias = flat[b + o : b + o + count]
            for r in range(R):
                row = y[y0 + r * stride : y0 + r * stride + count]
                for i in range(count):
                    row[i] += wide(bias[i])


@kernel
def _decode(tokens, slots, positions, flat, program, keys, values, frequencies, sizes, eps, workers, logits):
    # tokens, slots, positions (R,); flat (n,); program (phases, 7); keys, values (L, slots, G, S, D)
    # frequencies (D/2,), or (0,); sizes (7,); logits (R, V)
    R, (_, num_slots, G, S, D), (C, H, F, kind, centre, parts, room) = len(tokens), keys.shape, sizes
    x, y, qkv = np.empty((R, C), np.float32), np.empty((R, C), np.float32), np.empty((R, (H + 2 * G) * D), np.float32)
    n, a, h = np.empty((R, C), flat.dtype), np.empty((R, H * D), flat.dtype), np.empty((R, F), flat.dtype)
    cos, sin = np.empty((R, len(frequencies)), np.float32), np.empty((R, len(frequencies)), np.float32)
    all_keys, all_values, turns = keys.reshape(-1), values.reshape(-1), new_turns(len(program))
    inputs, attended, gated = n.reshape(-1), a.reshape(-1), h.reshape(-1)
    rooms = np.empty((workers, WIDTH + max(R * room, H // G * (S + WIDTH))), np.float32)
    for worker in prange(workers):
        found, local = bare(rooms[worker, :WIDTH]), bare(rooms[worker, WIDTH:])
        for phase in range(len(program)):
            what, w, b, I, O, span, pieces = program[phase]
            pieces *= R * G if what == ATTEND else R if what < ATTEND else 1
            piece = claim(turns, phase)
            while piece < pieces:
                if what == EMBED:
                    _embed(tokens[piece], positions[piece], flat, w, b, frequencies, x[piece], cos[piece], sin[piece])
                elif what == NORM:
                    _add_norm(x[piece], y[piece], flat, w, b, I, O, centre, eps, n[piece])
                elif what == ATTEND:
                    r, g, after = piece // G, piece % G, min(piece + workers, pieces - 1)  # after: this thread's next, likely
                    at = ((I * num_slots + slots[r]) * G + g) * S * D
                    next_at = ((I * num_slots + slots[after // G]) * G + after % G) * S * D
                    cache = all_keys, all_values, at, positions[r], (next_at, positions[after // G])
                    _heads(qkv[r], flat, w, b, *cache, H, G, g, D, cos[r], sin[r], eps, local, found, a[r])
                else:
                    first = piece * span
                    count = span if piece + 1 < pieces else O - first
                    source = attended if what == OUT else gated if what == DOWN else inputs
                    _outputs(source, flat, w, b, R, I, O, parts if what == UP else 1, first, count, local)
                    for r in range(R):
                        outputs = local[r * (count + WIDTH) : r * (count + WIDTH) + count]
                        if what == UP and parts == 1:
                            plain_row(kind, outputs, h[r, first : first + count])
                        elif what == UP:
                            up = local[(R + r) * (count + WIDTH) : (R + r) * (count + WIDTH) + count]
                            gated_row(kind, outputs, up, h[r, first : first + count])
                        elif what == HEAD:
                            _store(outputs, logits[r, first : first + count])
                        elif what == QKV:
                            _store(outputs, qkv[r, first : first + count])
                        else:
                            _store(outputs, y[r, first : first + count])
                finish(turns, phase)
                piece = claim(turns, phase)
            wait(turns, phase, pieces)


def _program(c: Any, offset: Callable[[str], int]) -> Iterator[list[int]]:  # c: a ModelConfig
    """Each phase: its kind, the offsets of its weight and bias (-1: there is none), three numbers, and its pieces. Of a norm
    the numbers say what _add_norm does; of attention, which layer it is; of a linear map, its inputs, outputs, and those of a
    piece. The pieces of the first three kinds are per row."""
    C, F, post = c.hidden_dim, c.intermediate_dim, c.norm_placement == "post"
    A = c.num_heads * c.head_dim
    KV = c.num_kv_heads * c.head_dim

    def linear(what: int, w: str, b: str, I: int, O: int) -> list[int]:
        least = max(-(-O // PIECES), -(-LEAST // I))
        span = -(-least // WIDTH) * WIDTH
        return [what, offset(w), offset(b), I, O, span, max(1, O // span)]  # the last piece has the rest, too

    def norm(name: str, adds: bool, replaces: bool = False) -> list[int]:
        return [NORM, offset(f"{name}.w"), offset(f"{name}.b"), adds, replaces, 0, 1]

    yield [EMBED, offset("embed.w"), offset("pos.w"), 0, 0, 0, 1]
    if post:
        yield norm("", adds=False)
    for layer in range(c.num_layers):
        block = f"blocks.{layer}"
        attn, ffn = f"{block}.attn", f"{block}.ffn"
        first = f"{ffn}.w_gate" if c.ffn in GATED else f"{ffn}.w_up"
        if not post:
            yield norm(f"{block}.attn_norm", adds=layer > 0)
        yield linear(QKV, f"{attn}.wq", f"{attn}.bq", C, A + 2 * KV)
        yield [ATTEND, offset(f"{attn}.q_norm.w"), offset(f"{attn}.k_norm.w"), layer, 0, 0, 1]
        yield linear(OUT, f"{attn}.wo", f"{attn}.bo", A, C)
        yield norm(f"{block}.attn_norm" if post else f"{block}.ffn_norm", adds=True, replaces=post)
        yield linear(UP, first, first.replace(".w_", ".b_"), C, F)
        yield linear(DOWN, f"{ffn}.w_down", f"{ffn}.b_down", F, C)
        if post:
            yield norm(f"{block}.ffn_norm", adds=True, replaces=True)
    yield norm("final_norm", adds=not post)
    yield linear(HEAD, "embed.w" if c.tie_embeddings else "head.w", "", C, c.vocab_size)


def decoder(
    config: Any,  # a ModelConfig
    spans: Mapping[str, tuple[int, int]],  # parameter -> where it lies in the flat buffer, and its size
    flat: Tensor,  # (n,) the parameters that matmuls read
) -> Callable[[Tensor, Tensor, Tensor, Any], Tensor] | None:
    """See OpSet.decoder; None for blocks other than attention and feed-forward that are alike in all layers."""
    c = config
    if c.blocks != DEFAULT_BLOCKS:
        return None
    program = np.array(list(_program(c, lambda name: spans[name][0] if name in spans else -1)), dtype=np.int64)
    parts = 2 if c.ffn in GATED else 1  # gate and up are one matrix, the gate first
    room = max(parts * (2 * span + WIDTH) for span in program[:, 5].tolist())  # numbers of a row that a piece computes
    D = c.head_dim
    turns = float(c.rope_theta) ** (-2.0 * np.arange(D // 2) / D) if c.position == "rope" else np.empty(0)
    sizes = np.array([c.hidden_dim, c.num_heads, c.intermediate_dim, KINDS[c.ffn], c.norm == "layer", parts, room])
    eps = np.float32(c.norm_eps)
    multiplications = int((program[:, 3] * program[:, 4])[program[:, 0] > ATTEND].sum())

    def decode(tokens: Tensor, slots: Tensor, positions: Tensor, kv_cache: Any) -> Tensor:  # (R,) int64 each -> (R, V)
        logits = torch.empty(len(tokens), c.vocab_size, dtype=flat.dtype, device="cpu")
        threads = numba.get_num_threads()
        workers = max(1, min(threads, len(tokens) * multiplications // PER_THREAD))
        if workers < threads:
            numba.set_num_threads(workers)
        try:
            _decode(
                array(tokens),
                array(slots),
                array(positions),
                array(flat),
                program,
                array(kv_cache.stacked["keys"][0]),
                array(kv_cache.stacked["values"][0]),
                turns,
                sizes,
                eps,
                workers,
                array(logits),
            )
        finally:
            if workers < threads:
                numba.set_num_threads(threads)
        return logits

    return decode
