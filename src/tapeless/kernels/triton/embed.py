"""Token embedding. Formulas: ops/embed.py.

Backward sorts the tokens stably, so that the positions of one token are adjacent and in order: the program at the first of them
sums all, and no other writes to that row. The same bits every time, without atomics.
Tested by: tests/kernels/triton/test_triton.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapeless.kernels.triton.launch import contiguous, launch, on_device
from tapeless.ops.embed import EMBED, EmbedSaved
from tapeless.ops.numerics import rows
from tapeless.ops.op import Op

BLOCK, WARPS = 1024, 4  # columns of a program
HEIGHT = 8  # positions that are added at a time


@triton.jit
def _gather_kernel(tokens, w, y, V, C, BLOCK: tl.constexpr):  # (N,) int64, (V, C), (N, C)
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + n)
    known = (token >= 0) & (token < V)  # an invalid token gives zeros, and nothing outside the table is read
    tl.store(y + n * C + c, tl.load(w + token * C + c, mask=(c < C) & known, other=0.0), mask=c < C)


@triton.jit
def _scatter_kernel(tokens, places, dy, dw, N, C, V, HEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    # tokens (N,) sorted, places (N,): their positions before; dy (N, C); dw (V, C) float32
    n, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + n)
    before = tl.load(tokens + n - 1, mask=n > 0, other=-1)
    if (token != before) & (token >= 0) & (token < V):
        sums = tl.zeros([HEIGHT, BLOCK], tl.float32)
        first, full = n, HEIGHT
        while full == HEIGHT:
            at = first + tl.arange(0, HEIGHT)
            mine = tl.load(tokens + at, mask=at < N, other=-1) == token
            place = tl.load(places + at, mask=mine, other=0)
            part = tl.load(dy + place[:, None] * C + c[None, :], mask=mine[:, None] & (c < C)[None, :], other=0.0)
            sums += part.to(tl.float32)
            full = tl.sum(mine.to(tl.int32), 0)
            first += HEIGHT
        row = dw + token * C + c
        tl.store(row, tl.load(row, mask=c < C) + tl.sum(sums, 0), mask=c < C)


@on_device
def embed_forward(
    tokens: Tensor,  # (...) int64
    w: Tensor,  # (V, C)
) -> tuple[Tensor, EmbedSaved]:  # y (..., C)
    V, C = w.shape
    y = torch.empty(*tokens.shape, C, dtype=w.dtype, device=w.device)
    grid = (tokens.numel(), triton.cdiv(C, BLOCK))
    moved = tokens.nbytes + 2 * y.nbytes  # rows of w, not all of it
    launch(_gather_kernel, grid, contiguous(tokens), w, y, V, C, moved=moved, BLOCK=BLOCK, num_warps=1)
    return y, EmbedSaved(tokens)


@on_device
def embed_backward(
    dy: Tensor,  # (..., C)
    saved: EmbedSaved,
    w: Tensor,  # (V, C)
    dw: Tensor | None,  # (V, C)  accumulated into
) -> None:
    if dw is None:
        return
    V, C = w.shape
    tokens, places = saved.tokens.reshape(-1).sort(stable=True)
    grid = (len(tokens), triton.cdiv(C, BLOCK))
    launch(
        _scatter_kernel, grid, tokens, places, contiguous(rows(dy)), dw, len(tokens), C, V,
        moved=2 * tokens.nbytes + dy.nbytes + 2 * min(len(tokens), V) * C * dw.itemsize,
        HEIGHT=HEIGHT, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


def embed() -> Op:
    return EMBED._replace(forward=embed_forward, backward=embed_backward)
