"""Linear map: matmuls (matmul.py) into buffers of the workspace. Formulas: ops/linear.py.

In float32 torch accumulates dw within the matmul. In bfloat16 the matmul is rounded to bfloat16 first (torch has none with a
float32 result on CPUs), a span of rows at a time, so that it is still in the cache when it is added.
Tested by: tests/kernels/test_cpu.py."""

from functools import partial

import torch
from numba import prange
from torch import Tensor

from tapeless.kernels.cpu.capture import launch
from tapeless.kernels.cpu.jit import array, inlined, kernel, wide
from tapeless.kernels.cpu.matmul import matmul
from tapeless.kernels.workspace import Workspace
from tapeless.ops.linear import LinearSaved
from tapeless.ops.numerics import add_row_sum, rows
from tapeless.ops.op import Op

SPAN = 2**13  # elements that a thread adds at a time
ROUNDED = 2**21  # elements of dw that are rounded at a time


@inlined
def add_span(dw, part):  # (n,) each
    for i in range(len(dw)):
        dw[i] += wide(part[i])


@inlined
def _set_span(dw, part):  # (n,) each
    for i in range(len(dw)):
        dw[i] = wide(part[i])


@kernel
def _add(dw, part, overwrite):  # (n,) float32, (n,) bfloat16
    for span in prange(-(-len(dw) // SPAN)):
        first, last = span * SPAN, min(len(dw), (span + 1) * SPAN)
        if overwrite:
            _set_span(dw[first:last], part[first:last])
        else:
            add_span(dw[first:last], part[first:last])


def accumulate_matmul(dw: Tensor, a: Tensor, b: Tensor, ws: Workspace, overwrite: bool) -> None:
    """dw (M, K) += a (M, N) @ b (N, K), or = with overwrite."""
    if dw.dtype == a.dtype:
        launch(dw.addmm_, a, b, beta=0 if overwrite else 1)
        return
    height, flat = max(1, ROUNDED // dw.shape[1]), array(dw.view(-1))
    part = ws.empty((min(height, len(dw)), dw.shape[1]), a.dtype)
    for first in range(0, len(dw), height):
        rows_of_a = a[first : first + height]
        out = part[: len(rows_of_a)]
        launch(torch.mm, rows_of_a, b, out=out)
        here = flat[first * dw.shape[1] : (first + len(out)) * dw.shape[1]]
        launch(_add, here, array(part).reshape(-1)[: out.numel()], overwrite)


def linear_forward(
    x: Tensor,  # (..., I)
    w: Tensor,  # (O, I)
    b: Tensor | None,  # (O,)
    *,
    ws: Workspace,
) -> tuple[Tensor, LinearSaved]:  # y (..., O)
    y = ws.empty((*x.shape[:-1], w.shape[0]), x.dtype)
    matmul(rows(x), w.t(), y.view(-1, w.shape[0]), b)
    return y, LinearSaved(x)


def linear_backward(
    dy: Tensor,  # (..., O)
    saved: LinearSaved,
    w: Tensor,  # (O, I)
    b: Tensor | None,  # (O,)
    dw: Tensor | None,  # (O, I)  accumulated into, or overwritten
    db: Tensor | None,  # (O,)  accumulated into
    *,
    ws: Workspace,
    overwrite: bool,
    want_dx: bool = True,
) -> Tensor | None:  # dx (..., I)
    if dw is not None:
        accumulate_matmul(dw, rows(dy).t(), rows(saved.x), ws, overwrite)
    if db is not None:
        add_row_sum(db, dy)
    if not want_dx:
        return None
    dx = ws.empty((*dy.shape[:-1], w.shape[1]), dy.dtype)
    matmul(rows(dy), w, dx.view(-1, w.shape[1]))
    return dx


def linear(ws: Workspace, *, overwrite: bool = False) -> Op:
    backward = partial(linear_backward, ws=ws, overwrite=overwrite)
    return Op(partial(linear_forward, ws=ws), backward, backward_dw=partial(backward, want_dx=False))
