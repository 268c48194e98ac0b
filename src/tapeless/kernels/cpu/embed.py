"""Token embedding: torch gathers the rows; their gradients are summed in a fixed order.

Backward: each thread owns a span of columns and loops over all tokens in their order, so a token that occurs several times
needs no lock and its sum has one order.
Tested by: tests/kernels/test_cpu.py."""

from functools import partial

import torch
from numba import prange
from torch import Tensor

from tapeless.kernels.cpu.capture import launch
from tapeless.kernels.cpu.jit import array, kernel, matrix
from tapeless.kernels.cpu.linear import add_span
from tapeless.kernels.workspace import Workspace
from tapeless.ops.embed import EMBED, EmbedSaved
from tapeless.ops.op import Op

COLUMNS = 64  # of a span: whole cache lines, also of bfloat16


@kernel
def _backward(tokens, dy, dw):  # (N,), (N, C), (V, C)
    N, C = dy.shape
    for span in prange(-(-C // COLUMNS)):
        first, last = span * COLUMNS, min(C, (span + 1) * COLUMNS)
        for n in range(N):
            add_span(dw[tokens[n], first:last], dy[n, first:last])


def embed_forward(
    tokens: Tensor,  # (...) int64
    w: Tensor,  # (V, C)
    *,
    ws: Workspace,
) -> tuple[Tensor, EmbedSaved]:  # y (..., C)
    y = ws.empty((*tokens.shape, w.shape[1]), w.dtype)
    launch(torch.index_select, w, 0, tokens.reshape(-1), out=y.view(-1, w.shape[1]))
    return y, EmbedSaved(tokens)


def embed_backward(
    dy: Tensor,  # (..., C)
    saved: EmbedSaved,
    w: Tensor,  # (V, C)
    dw: Tensor | None,  # (V, C)  accumulated into
) -> None:
    if dw is not None:
        launch(_backward, array(saved.tokens.reshape(-1).contiguous()), matrix(dy), array(dw))


def embed(ws: Workspace) -> Op:
    return EMBED._replace(forward=partial(embed_forward, ws=ws), backward=embed_backward)
