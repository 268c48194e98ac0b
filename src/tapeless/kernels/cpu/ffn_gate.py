"""The middle of the feed-forward layer in one pass: the activation, and the gate's product where there is one.

Formulas: ops/ffn_gate.py and ops/pointwise.py. Backward computes f and f' together, from one exponential.
Judged by: tests/kernels/test_cpu.py."""

from functools import partial
from typing import Any

import numpy as np
from numba import prange
from torch import Tensor

from tapeless.kernels.cpu.functions import GELU_C, GELU_K, gelu_tanh, sigmoid, tanh
from tapeless.kernels.cpu.jit import inlined, kernel, matrix, put, wide
from tapeless.kernels.workspace import Workspace
from tapeless.ops.ffn_gate import GATED, GatedSaved
from tapeless.ops.op import Op
from tapeless.ops.pointwise import PointwiseSaved

SILU, GELU, TANH, RELU, RELU2 = range(5)  # a number, since kernels that differ in a function could not be kept on disk
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
    return (ZERO if x <= ZERO else x), (ZERO if x <= ZERO else ONE)  # NaN is not below zero and stays


@inlined
def _relu2(x):
    r = ZERO if x <= ZERO else x
    return r * r, TWO * r


def _gated(f_df: Any) -> tuple[Any, Any]:
    """The rows of one kind, forward and backward: a loop that knows its function is vectorised."""

    @inlined
    def forward(gate, up, h):  # (F,) each
        for i in range(len(h)):
            put(h, i, f_df(wide(gate[i]))[0] * wide(up[i]))

    @inlined
    def backward(dh, gate, up, dgate, dup):  # (F,) each
        for i in range(len(dh)):
            f, df = f_df(wide(gate[i]))
            d = wide(dh[i])
            put(dgate, i, d * wide(up[i]) * df)
            put(dup, i, d * f)

    return forward, backward


def _plain(f_df: Any) -> tuple[Any, Any]:
    @inlined
    def forward(x, y):  # (F,) each
        for i in range(len(y)):
            put(y, i, f_df(wide(x[i]))[0])

    @inlined
    def backward(dy, x, dx):  # (F,) each
        for i in range(len(dx)):
            put(dx, i, wide(dy[i]) * f_df(wide(x[i]))[1])

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
def _gated_backward(kind, dh, gate_up, dgate_up):  # (N, F), (N, 2F), (N, 2F)
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
def _plain_backward(kind, dy, x, dx):  # (N, F) each
    for n in prange(len(x)):
        if kind == GELU:
            gelu_row_backward(dy[n], x[n], dx[n])
        elif kind == TANH:
            tanh_row_backward(dy[n], x[n], dx[n])
        elif kind == RELU:
            relu_row_backward(dy[n], x[n], dx[n])
        else:
            relu2_row_backward(dy[n], x[n], dx[n])


def gated_forward(
    gate_up: Tensor,  # (..., 2F)
    *,
    kind: int,
    ws: Workspace,
) -> tuple[Tensor, GatedSaved]:  # h (..., F)
    h = ws.empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2), gate_up.dtype)
    _gated_forward(kind, matrix(gate_up), matrix(h))
    return h, GatedSaved(gate_up)


def gated_backward(
    dh: Tensor,  # (..., F)
    saved: GatedSaved,
    *,
    kind: int,
    ws: Workspace,
) -> Tensor:  # dgate_up (..., 2F)
    dgate_up = ws.empty(saved.gate_up.shape, dh.dtype)
    _gated_backward(kind, matrix(dh), matrix(saved.gate_up), matrix(dgate_up))
    return dgate_up


def plain_forward(
    x: Tensor,  # (..., F)
    *,
    kind: int,
    ws: Workspace,
) -> tuple[Tensor, PointwiseSaved]:  # y (..., F)
    y = ws.empty(x.shape, x.dtype)
    _plain_forward(kind, matrix(x), matrix(y))
    return y, PointwiseSaved(x)


def plain_backward(
    dy: Tensor,  # (..., F)
    saved: PointwiseSaved,
    *,
    kind: int,
    ws: Workspace,
) -> Tensor:  # dx (..., F)
    dx = ws.empty(dy.shape, dy.dtype)
    _plain_backward(kind, matrix(dy), matrix(saved.x), matrix(dx))
    return dx


def ffn_gates(ws: Workspace) -> dict[str, Op]:
    def op(name: str, kind: int) -> Op:
        forward, backward = (gated_forward, gated_backward) if name in GATED else (plain_forward, plain_backward)
        return Op(partial(forward, kind=kind, ws=ws), partial(backward, kind=kind, ws=ws))

    return {name: op(name, kind) for name, kind in KINDS.items()}
