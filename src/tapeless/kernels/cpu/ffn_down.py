"""The activation or gate of the feed-forward layer in one pass, and the linear map after it.

Formulas: ops/ffn_down.py, ops/ffn_gate.py and ops/pointwise.py. Backward computes f and f' together, from one exponential; the
same pass overwrites dh by h, from which dw is computed.
Tested by: tests/kernels/test_cpu.py."""

from functools import partial
from typing import Any

import numpy as np
from numba import prange
from torch import Tensor

from tapeless.kernels.cpu.capture import launch
from tapeless.kernels.cpu.functions import GELU_C, GELU_K, gelu_tanh, sigmoid, tanh
from tapeless.kernels.cpu.jit import inlined, kernel, matrix, put, wide
from tapeless.kernels.cpu.linear import linear_backward, linear_forward
from tapeless.kernels.cpu.matmul import matmul
from tapeless.kernels.workspace import Workspace
from tapeless.ops.ffn_down import FFN_DOWN, FFNDownSaved
from tapeless.ops.ffn_gate import GATED
from tapeless.ops.linear import LinearSaved
from tapeless.ops.numerics import rows
from tapeless.ops.op import Op

SILU, GELU, TANH, RELU, RELU2 = range(5)  # integers, since kernels that take a function cannot be cached on disk
KINDS = {"swiglu": SILU, "geglu": GELU, "gelu": GELU, "tanh": TANH, "relu": RELU, "relu2": RELU2}
ZERO, HALF, ONE, TWO, THREE = (np.float32(x) for x in (0, 0.5, 1, 2, 3))


@inlined
def _silu(x):  # f, f'
    s = sigmoid(x)
    return x * s, s * (ONE + x * (ONE - s))


@inlined
def _gelu(x):
    t = gelu_tanh(x)
    du = GELU_K * (ONE + THREE * GELU_C * x * x)
    return HALF * x * (ONE + t), HALF * (ONE + t) + HALF * x * (ONE - t * t) * du


@inlined
def _tanh(x):
    t = tanh(x)
    return t, ONE - t * t


@inlined
def _relu(x):
    return (ZERO if x <= ZERO else x), (ZERO if x <= ZERO else ONE)  # propagates NaN


@inlined
def _relu2(x):
    r = ZERO if x <= ZERO else x
    return r * r, TWO * r


def _gated(f_df: Any) -> tuple[Any, Any]:
    """The row functions of one kind, forward and backward: a loop over a known function is vectorised."""

    @inlined
    def forward(gate, up, h):  # (F,) each
        for i in range(len(h)):
            put(h, i, f_df(wide(gate[i]))[0] * wide(up[i]))

    @inlined
    def backward(dh, gate, up, dgate, dup):  # (F,) each; dh in, h out
        for i in range(len(dh)):
            f, df = f_df(wide(gate[i]))
            d = wide(dh[i])
            put(dgate, i, d * wide(up[i]) * df)
            put(dup, i, d * f)
            put(dh, i, f * wide(up[i]))

    return forward, backward


def _plain(f_df: Any) -> tuple[Any, Any]:
    @inlined
    def forward(x, y):  # (F,) each
        for i in range(len(y)):
            put(y, i, f_df(wide(x[i]))[0])

    @inlined
    def backward(dy, x, dx):  # (F,) each; dy in, y out
        for i in range(len(dx)):
            f, df = f_df(wide(x[i]))
            put(dx, i, wide(dy[i]) * df)
            put(dy, i, f)

    return forward, backward


swiglu_row, swiglu_row_backward = _gated(_silu)
geglu_row, geglu_row_backward = _gated(_gelu)
gelu_row, gelu_row_backward = _plain(_gelu)
tanh_row, tanh_row_backward = _plain(_tanh)
relu_row, relu_row_backward = _plain(_relu)
relu2_row, relu2_row_backward = _plain(_relu2)


@inlined
def gated_row(kind, gate, up, h):  # (F,) each
    if kind == SILU:
        swiglu_row(gate, up, h)
    else:
        geglu_row(gate, up, h)


@inlined
def plain_row(kind, x, y):  # (F,) each
    if kind == GELU:
        gelu_row(x, y)
    elif kind == TANH:
        tanh_row(x, y)
    elif kind == RELU:
        relu_row(x, y)
    else:
        relu2_row(x, y)


@kernel
def _gated_forward(kind, gate_up, h):  # (N, 2F), (N, F)
    N, F = h.shape
    for n in prange(N):
        gated_row(kind, gate_up[n, :F], gate_up[n, F:], h[n])


@kernel
def _gated_backward(kind, dh, gate_up, dgate_up):  # (N, F) dh in and h out, (N, 2F), (N, 2F)
    N, F = dh.shape
    for n in prange(N):
        if kind == SILU:
            swiglu_row_backward(dh[n], gate_up[n, :F], gate_up[n, F:], dgate_up[n, :F], dgate_up[n, F:])
        else:
            geglu_row_backward(dh[n], gate_up[n, :F], gate_up[n, F:], dgate_up[n, :F], dgate_up[n, F:])


@kernel
def _plain_forward(kind, x, y):  # (N, F) each
    for n in prange(len(x)):
        plain_row(kind, x[n], y[n])


@kernel
def _plain_backward(kind, dy, x, dx):  # (N, F) each; dy in, y out
    for n in prange(len(x)):
        if kind == GELU:
            gelu_row_backward(dy[n], x[n], dx[n])
        elif kind == TANH:
            tanh_row_backward(dy[n], x[n], dx[n])
        elif kind == RELU:
            relu_row_backward(dy[n], x[n], dx[n])
        else:
            relu2_row_backward(dy[n], x[n], dx[n])


def ffn_down_forward(
    gate_up: Tensor,  # (..., 2F), or (..., F) for kinds without a gate
    w: Tensor,  # (C, F)
    b: Tensor | None,  # (C,)
    *,
    name: str,
    ws: Workspace,
) -> tuple[Tensor, FFNDownSaved]:  # y (..., C)
    h = ws.empty((*gate_up.shape[:-1], w.shape[1]), gate_up.dtype)
    run = _gated_forward if name in GATED else _plain_forward
    launch(run, KINDS[name], matrix(gate_up), matrix(h))
    return linear_forward(h, w, b, ws=ws)[0], FFNDownSaved(gate_up)


def ffn_down_backward(
    dy: Tensor,  # (..., C)
    saved: FFNDownSaved,
    w: Tensor,  # (C, F)
    b: Tensor | None,  # (C,)
    dw: Tensor | None,  # (C, F)  accumulated into, or overwritten
    db: Tensor | None,  # (C,)  accumulated into
    *,
    name: str,
    ws: Workspace,
    overwrite: bool,
    want_dx: bool = True,
) -> Tensor | None:  # dgate_up, as gate_up
    flat, gate_up = rows(dy), saved.gate_up
    dh = ws.empty((len(flat), w.shape[1]), dy.dtype)
    if want_dx:
        matmul(flat, w, dh)
    dgate_up = ws.empty(gate_up.shape, dh.dtype)
    run = _gated_backward if name in GATED else _plain_backward
    launch(run, KINDS[name], matrix(dh), matrix(gate_up), matrix(dgate_up))
    h = dh  # overwritten by the kernel; h does not depend on dh
    linear_backward(dy, LinearSaved(h), w, b, dw, db, ws=ws, overwrite=overwrite, want_dx=False)
    return dgate_up if want_dx else None


def ffn_down(ws: Workspace, *, overwrite: bool = False) -> dict[str, Op]:
    def op(name: str) -> Op:
        forward = partial(ffn_down_forward, name=name, ws=ws)
        backward = partial(ffn_down_backward, name=name, ws=ws, overwrite=overwrite)
        return FFN_DOWN[name]._replace(forward=forward, backward=backward, backward_dw=partial(backward, want_dx=False))

    return {name: op(name) for name in KINDS}
