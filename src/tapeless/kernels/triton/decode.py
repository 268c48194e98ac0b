"""A token of each of several sequences, or several tokens of one, through the whole model in seven launches per layer.

    norm -> qkv, rotation, cache -> attention -> out and residual -> norm -> up, gate -> down and residual
A step of few rows costs as much as reading the weights, so a linear map reads each weight once for up to ROWS rows. Norms are
not part of the linear maps after them: each of their programs would normalise all columns again, which took longer than a
launch. Between kernels the residual stream is float32; what a matmul reads has the dtype of the weights.

A row of the logits has the same bits whatever the other rows are, and whether its token came alone or in a prompt: every sum
runs in one order. A program holds at most 32 rows, for which the compiler takes the matmul instruction of 16 rows; from 64 rows
on it would take another one, with sums of its own. The keys are split at fixed positions, and no split is added atomically.
All keys and values are written by the launch before the one that reads them.
Same formulas, same order as model/block.py. Tested by: tests/kernels/triton/test_triton_decode.py."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapeless.config import DEFAULT_BLOCKS
from tapeless.kernels.triton.add_norm import add_norm_forward
from tapeless.kernels.triton.attention import LOG2E
from tapeless.kernels.triton.ffn_down import KINDS, f_df
from tapeless.kernels.triton.launch import contiguous, launch, on_device
from tapeless.kernels.triton.qkv_rope import Tables, angles
from tapeless.ops.ffn_gate import GATED

ROWS = 32  # most rows of a program: a further program reads the weights again, from the cache of the GPU
SPLIT = 512  # keys of a program; longer sequences have several, whose results are added in their order


class Tile(NamedTuple):
    """How a linear map is cut into programs. None of this changes a bit."""

    columns: int  # of the output
    warps: int
    stages: int


DEPTH = 256  # bfloat16 inputs of a linear map that are added at a time, which sets the order of its sums
# Rows of a program -> launch -> tile: the fastest of those that acceptance/generation_cuda.py compares, on an H200.
TILES = {
    16: {"qkv": Tile(16, 2, 4), "out": Tile(32, 4, 4), "up": Tile(64, 4, 3), "down": Tile(32, 4, 4), "head": Tile(64, 4, 3)},
    32: {"qkv": Tile(32, 4, 3), "out": Tile(16, 4, 4), "up": Tile(32, 4, 3), "down": Tile(16, 4, 4), "head": Tile(64, 4, 3)},
}
KEYS, ATTENTION_WARPS, ATTENTION_STAGES = 32, 2, 3
LARGEST = 2**15  # bytes of a block of keys: some of them, and of values, are in shared memory
BLOCK = 1024  # features of a token that a program of the embedding copies


# The same machine code for any number of rows.
one_for_all_rows = partial(triton.jit, do_not_specialize=["R"])


@triton.jit
def _embed_kernel(
    tokens, positions, w, table, x, V, C, LEARNED: tl.constexpr, BLOCK: tl.constexpr
):  # tokens, positions (R,); w (V, C); table (Tmax, C); x (R, C) float32  # fmt: skip
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + n)
    known = (c < C) & (token >= 0) & (token < V)  # an invalid token gives zeros, and nothing outside the table is read
    row = tl.load(w + token * C + c, mask=known, other=0.0).to(tl.float32)
    if LEARNED:
        row += tl.load(table + tl.load(positions + n) * C + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(x + n * C + c, row, mask=c < C)


@triton.jit
def _times(
    x, w, r, o, R, I, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr
):  # x (R, I) at rows r, times rows o of w (O, I) -> (ROWS, COLUMNS) float32
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    at_x, at_w = x + r[:, None] * I, w + o.to(tl.int64)[:, None] * I
    for first in range(0, I, DEPTH):
        i = first + tl.arange(0, DEPTH)
        a = tl.load(at_x + i[None, :], mask=(r < R)[:, None] & (i < I)[None, :], other=0.0)
        b = tl.load(at_w + i[None, :], mask=(i < I)[None, :], other=0.0)
        sums = tl.dot(a, tl.trans(b), sums, input_precision=PRECISION)
    return sums


@triton.jit
def _halves(y, ROWS: tl.constexpr, HALF: tl.constexpr):  # (ROWS, 2 HALF) -> its left and its right half, (ROWS, HALF) each
    return tl.split(tl.permute(tl.reshape(y, (ROWS, 2, HALF)), (0, 2, 1)))


@triton.jit
def _bias(y, b, o, HAS_BIAS: tl.constexpr):  # (ROWS, COLUMNS) + (O,) at o (COLUMNS,)
    return y + tl.load(b + o).to(tl.float32)[None, :] if HAS_BIAS else y


@one_for_all_rows
def _qkv_kernel(
    x, w, b, q_norm, k_norm, cos, sin, slots, positions, q, keys, values, of_slot, of_head, R, C, H, G, D, half, blocks,
    eps, HAS_BIAS: tl.constexpr, HEAD_NORM: tl.constexpr, ROPE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # x (R, C); w ((H+2G) D, C); q (R, H, D); keys, values (slots, G, S, D)  # fmt: skip
    """A program has features c and c + half of a head, which are rotated together, for all c or some."""
    HALF: tl.constexpr = COLUMNS // 2
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    r, j = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    o = head * D + tl.minimum(block * HALF + j % HALF + (j // HALF) * half, D - 1)
    y = _times(x, w, r, o, R, C, ROWS, COLUMNS, DEPTH, PRECISION)
    lo, hi = _halves(_bias(y, b, o, HAS_BIAS), ROWS, HALF)
    c = block * HALF + tl.arange(0, HALF)
    in_lo, in_hi = (r < R)[:, None] & (c < half)[None, :], (r < R)[:, None] & (c + half < D)[None, :]
    slot, position = tl.load(slots + r, mask=r < R, other=0), tl.load(positions + r, mask=r < R, other=0)
    if head < H + G:
        if HEAD_NORM:
            weight = q_norm if head < H else k_norm
            lo, hi = tl.where(in_lo, lo, 0.0), tl.where(in_hi, hi, 0.0)
            rstd = (1.0 / tl.sqrt((tl.sum(lo * lo, 1) + tl.sum(hi * hi, 1)) / D + eps))[:, None]
            lo *= rstd * tl.load(weight + c, mask=c < half, other=0.0).to(tl.float32)[None, :]
            hi *= rstd * tl.load(weight + half + c, mask=c + half < D, other=0.0).to(tl.float32)[None, :]
        if ROPE:
            cosine, sine = angles(cos, sin, position, c, half, in_lo)
            lo, hi = lo * cosine - hi * sine, hi * cosine + lo * sine
    if head < H:
        at = q + (r * H + head)[:, None] * D + c[None, :]
    else:
        g = (head - H) % G
        at = (keys if head < H + G else values) + (slot * of_slot + g * of_head + position * D)[:, None] + c[None, :]
    tl.store(at, lo.to(q.dtype.element_ty), mask=in_lo)
    tl.store(at + half, hi.to(q.dtype.element_ty), mask=in_hi)


@triton.jit
def _decode_attention_kernel(
    q, keys, values, slots, positions, out, top_of, total_of, of_slot, of_head, H, G, D, scale,
    WHOLE: tl.constexpr, SPLIT: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # q, out (R, H, D); keys, values (slots, G, S, D)  # fmt: skip
    """A program has the query heads of one key head, and the keys of one split. If there are several, out is (R, splits, H, D)
    float32, not yet divided by total (R, splits, H)."""
    row, g, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    h, c = g * (H // G) + tl.arange(0, HEADS), tl.arange(0, WIDTH)
    there = (tl.arange(0, HEADS) < H // G)[:, None] & (c < D)[None, :]
    slot, end = tl.load(slots + row), tl.load(positions + row).to(tl.int32) + 1
    base = slot * of_slot + g * of_head
    query = tl.load(q + (row * H + h)[:, None] * D + c[None, :], mask=there, other=0.0)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, WIDTH], tl.float32)
    for first in range(split * SPLIT, tl.minimum(end, (split + 1) * SPLIT), KEYS):
        s = first + tl.arange(0, KEYS)
        at, inside = base + s[:, None] * D + c[None, :], (s < end)[:, None] & (c < D)[None, :]
        key, value = tl.load(keys + at, mask=inside, other=0.0), tl.load(values + at, mask=inside, other=0.0)
        z = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * LOG2E)
        z = tl.where((s < end)[None, :], z, float("-inf"))
        higher = tl.maximum(top, tl.max(z, 1))  # finite: the first key of a block is there
        p, fade = tl.exp2(z - higher[:, None]), tl.exp2(top - higher)
        total = total * fade + tl.sum(p, 1)
        sums = sums * fade[:, None] + tl.dot(p.to(value.dtype), value, input_precision=PRECISION)
        top = higher
    if WHOLE:
        tl.store(out + (row * H + h)[:, None] * D + c[None, :], (sums / total[:, None]).to(out.dtype.element_ty), mask=there)
    elif split * SPLIT < end:
        at = (row * tl.num_programs(2) + split) * H + h
        tl.store(out + at.to(tl.int64)[:, None] * D + c[None, :], sums, mask=there)
        in_group = tl.arange(0, HEADS) < H // G
        tl.store(top_of + at, top, mask=in_group)
        tl.store(total_of + at, total, mask=in_group)


@triton.jit
def _combine_kernel(
    parts, top_of, total_of, positions, out, splits, H, D, SPLIT: tl.constexpr, WIDTH: tl.constexpr
):  # parts (R, splits, H, D), top_of, total_of (R, splits, H) float32; out (R, H, D)
    """In the order of the splits, one at a time: of one split it is what the attention kernel gives."""
    row, h, c = tl.program_id(0), tl.program_id(1), tl.arange(0, WIDTH)
    top, total, sums = -float("inf"), 0.0, tl.zeros([WIDTH], tl.float32)
    for split in range(tl.load(positions + row).to(tl.int32) // SPLIT + 1):
        at = (row * splits + split) * H + h
        of_split = tl.load(top_of + at)
        higher = tl.maximum(top, of_split)
        fade, factor = tl.exp2(top - higher), tl.exp2(of_split - higher)
        total = total * fade + tl.load(total_of + at) * factor
        sums = sums * fade + tl.load(parts + at.to(tl.int64) * D + c, mask=c < D, other=0.0) * factor
        top = higher
    tl.store(out + (row * H + h) * D + c, (sums / total).to(out.dtype.element_ty), mask=c < D)


@one_for_all_rows
def _up_kernel(
    x, w, b, h, R, C, F, HAS_BIAS: tl.constexpr, KIND: tl.constexpr, IS_GATED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # x (R, C); w (2F, C) or (F, C); h (R, F)  # fmt: skip
    WIDTH: tl.constexpr = COLUMNS // 2 if IS_GATED else COLUMNS  # a gate and what it multiplies are in one program
    r, j = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    o = tl.minimum(tl.program_id(0) * WIDTH + j % WIDTH, F - 1) + (j // WIDTH) * F
    y = _bias(_times(x, w, r, o, R, C, ROWS, COLUMNS, DEPTH, PRECISION), b, o, HAS_BIAS)
    if IS_GATED:
        gate, up = _halves(y, ROWS, WIDTH)
        f, _ = f_df(gate, KIND)
        f *= up
    else:
        f, _ = f_df(y, KIND)
    c = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(h + r[:, None] * F + c[None, :], f.to(h.dtype.element_ty), mask=(r < R)[:, None] & (c < F)[None, :])


@one_for_all_rows
def _linear_kernel(
    x, w, b, y, R, I, O, HAS_BIAS: tl.constexpr, ADD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # x (R, I); w (O, I); y (R, O), accumulated into if ADD  # fmt: skip
    r, c = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    o = tl.minimum(c, O - 1)
    out = _bias(_times(x, w, r, o, R, I, ROWS, COLUMNS, DEPTH, PRECISION), b, o, HAS_BIAS)
    at, inside = y + r.to(tl.int64)[:, None] * O + c[None, :], (r < R)[:, None] & (c < O)[None, :]
    if ADD:
        out += tl.load(at, mask=inside, other=0.0)
    tl.store(at, out.to(y.dtype.element_ty), mask=inside)


def decoder(
    config: Any,  # a ModelConfig
    spans: Mapping[str, tuple[int, int]],  # parameter -> where it is in the flat buffer, and its size
    flat: Tensor,  # (n,) the parameters that matmuls read
) -> Callable[[Tensor, Tensor, Tensor, Any], Tensor] | None:
    """See OpSet.decoder; None for blocks other than attention and feed-forward that are alike in all layers."""
    return _Decode(config, spans, flat).decode if config.blocks == DEFAULT_BLOCKS else None


class _Decode:
    def __init__(self, config: Any, spans: Mapping[str, tuple[int, int]], flat: Tensor):
        self.config, self.spans, self.flat, self.tables = config, spans, flat, Tables()

    def _of(self, *names: str) -> Tensor | None:
        """The first of these parameters that exists, flat. Kernels read on into those that are joined to it."""
        spans = [self.spans[name] for name in names if name in self.spans]
        return self.flat[spans[0][0] : sum(spans[0])] if spans else None

    @on_device
    def decode(
        self,
        tokens: Tensor,  # (R,) int64
        slots: Tensor,  # (R,) int64
        positions: Tensor,  # (R,) int64
        kv_cache: Any,
    ) -> Tensor:  # (R, V)
        c, R, post = self.config, len(tokens), self.config.norm_placement == "post"
        V, C, w, table = c.vocab_size, c.hidden_dim, self._of("embed.w"), self._of("pos.w")
        x = torch.empty(R, C, dtype=torch.float32, device=tokens.device)
        tokens, slots, positions = contiguous(tokens), contiguous(slots), contiguous(positions)
        launch(
            _embed_kernel, (R, triton.cdiv(C, BLOCK)), tokens, positions, w, w if table is None else table, x, V, C,
            LEARNED=table is not None, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
        keys, values = kv_cache.stacked["keys"][0], kv_cache.stacked["values"][0]
        for layer in range(c.num_layers):
            for part, name in ((self._attention, f"blocks.{layer}.attn"), (self._feed_forward, f"blocks.{layer}.ffn")):
                n = x.to(self.flat.dtype) if post else self._norm(x, f"{name}_norm", self.flat.dtype)
                part(x, n, name, slots, positions, keys[layer], values[layer])
                if post:
                    x = self._norm(x, f"{name}_norm", x.dtype)
        logits = torch.empty(R, V, dtype=self.flat.dtype, device=x.device)
        n = self._norm(x, "final_norm", self.flat.dtype)
        self._linear("head", n, self._of("embed.w" if c.tie_embeddings else "head.w"), None, logits, add=False)
        return logits

    def _norm(self, x: Tensor, name: str, dtype: torch.dtype) -> Tensor:  # (R, C) both
        params = self._of(f"{name}.w"), self._of(f"{name}.b")
        return add_norm_forward(x, None, *params, eps=self.config.norm_eps, centre=self.config.norm == "layer", dtype=dtype)[1]

    def _attention(
        self,
        x: Tensor,  # (R, C)  accumulated into
        n: Tensor,  # (R, C)
        name: str,
        slots: Tensor,  # (R,)
        positions: Tensor,  # (R,)
        keys: Tensor,  # (slots, G, S, D)
        values: Tensor,  # (slots, G, S, D)
    ) -> None:
        c, R, H, (_, G, S, D) = self.config, len(x), self.config.num_heads, keys.shape
        theta, half = c.rope_theta if c.position == "rope" else None, (D + 1) // 2
        cos, sin = (x, x) if theta is None else self.tables(D, theta, S, x.device)
        q, out = torch.empty(2, R, H, D, dtype=self.flat.dtype, device=x.device)
        w, b, q_norm, k_norm = (self._of(f"{name}.{part}") for part in ("wq", "bq", "q_norm.w", "k_norm.w"))
        tile = self._tile("qkv", R if q_norm is None else 1)
        if q_norm is not None:  # a program has whole heads, and their sums one order: always the same program
            tile["COLUMNS"] = columns = max(16, 2 * triton.next_power_of_2(half))
            tile["DEPTH"] //= 2
            tile["num_warps"], tile["num_stages"] = 4, max(2, min(4, 512 // columns))  # as many as fit into shared memory
        blocks = triton.cdiv(half, tile["COLUMNS"] // 2)
        launch(
            _qkv_kernel, ((H + 2 * G) * blocks, triton.cdiv(R, tile["ROWS"])),
            n, *_or(w, w, b, q_norm, k_norm), cos, sin, slots, positions, q, keys, values,
            *keys.stride()[:2], R, c.hidden_dim, H, G, D, half, blocks, c.norm_eps,
            HAS_BIAS=b is not None, HEAD_NORM=q_norm is not None, ROPE=theta is not None, **tile,
        )  # fmt: skip
        splits, width = triton.cdiv(S, SPLIT), triton.next_power_of_2(D)
        whole = splits == 1
        parts = out if whole else torch.empty(R, splits, H, D, dtype=torch.float32, device=x.device)
        top, total = (out, out) if whole else torch.empty(2, R, splits, H, dtype=torch.float32, device=x.device)
        launch(
            _decode_attention_kernel, (R, G, splits),
            q, keys, values, slots, positions, parts, top, total, *keys.stride()[:2], H, G, D, 1 / math.sqrt(D),
            WHOLE=whole, SPLIT=SPLIT, HEADS=max(16, triton.next_power_of_2(H // G)), WIDTH=max(16, width),
            KEYS=min(KEYS, LARGEST // (max(16, width) * q.itemsize)),
            PRECISION=tile["PRECISION"], num_warps=ATTENTION_WARPS, num_stages=ATTENTION_STAGES,
        )  # fmt: skip
        if not whole:
            launch(
                _combine_kernel, (R, H), parts, top, total, positions, out, splits, H, D, SPLIT=SPLIT, WIDTH=width, num_warps=1
            )
        self._linear("out", out.view(R, H * D), self._of(f"{name}.wo"), self._of(f"{name}.bo"), x)

    def _feed_forward(self, x: Tensor, n: Tensor, name: str, *_: Tensor) -> None:
        """As _attention."""
        c, (R, C), F, gated = self.config, x.shape, self.config.intermediate_dim, self.config.ffn in GATED
        h = torch.empty(R, F, dtype=self.flat.dtype, device=x.device)
        w, b = self._of(f"{name}.w_gate", f"{name}.w_up"), self._of(f"{name}.b_gate", f"{name}.b_up")
        tile = self._tile("up", R)
        launch(
            _up_kernel, (triton.cdiv(F, tile["COLUMNS"] // (2 if gated else 1)), triton.cdiv(R, tile["ROWS"])),
            n, *_or(w, w, b), h, R, C, F, HAS_BIAS=b is not None, KIND=KINDS[c.ffn], IS_GATED=gated, **tile,
        )  # fmt: skip
        self._linear("down", h, self._of(f"{name}.w_down"), self._of(f"{name}.b_down"), x)

    def _linear(
        self,
        kind: str,
        x: Tensor,  # (R, I)
        w: Tensor | None,  # (O, I), flat
        b: Tensor | None,  # (O,)
        y: Tensor,  # (R, O)  accumulated into, or written
        *,
        add: bool = True,
    ) -> None:
        (R, I), O, tile = x.shape, y.shape[1], self._tile(kind, len(x))
        launch(
            _linear_kernel, (triton.cdiv(O, tile["COLUMNS"]), triton.cdiv(R, tile["ROWS"])),
            x, *_or(w, w, b), y, R, I, O, HAS_BIAS=b is not None, ADD=add, **tile,
        )  # fmt: skip

    def _tile(self, kind: str, R: int) -> dict[str, Any]:
        rows = 16 if R <= 16 else ROWS
        columns, warps, stages = TILES[rows][kind]
        return {
            "ROWS": rows,
            "COLUMNS": columns,
            "DEPTH": DEPTH * 2 // self.flat.itemsize,
            "PRECISION": "ieee" if self.flat.dtype == torch.float32 else None,
            "num_warps": warps,
            "num_stages": stages,
        }


def _or(some: Tensor | None, *args: Tensor | None) -> list[Tensor | None]:
    """A kernel takes a tensor also where it reads none."""
    return [some if x is None else x for x in args]
