"""The middle of the feed-forward layer in one pass: the activation, and the gate's product where there is one.

Formulas: ops/ffn_gate.py and ops/pointwise.py. Backward computes f and f' together, from one exponential.
Judged by: tests/kernels/test_cpu.py."""

from functools import partial
from typing import Any

import numpy as np
from numba import prange
from torch import Tensor

from tapeless.kernels.cpu.functions import GELU_C, GELU_K, gelu_tanh, sigmoid, tanh
from tapeless.kernels.cpu.jit import array, inlined, kernel, put, wide
from tapeless.kernels.workspace import Workspace
from tapeless.ops.ffn_gate import GatedSaved
from tapeless.ops.numerics import rows
from tapeless.ops.op import Op
from tapeless.ops.pointwise import PointwiseSaved

SILU, GELU, TANH, RELU, RELU2 = range(5)  # a number, since kernels that differ in a function could not be kept on disk
ZERO, HALF, ONE, TWO, THREE = (np.float32(x) for x in (0, 0.5, 1, 2, 3))


@inlined
def _f(kind, x):
    """The branch is the same for a whole loop: LLVM makes one loop of each kind, and vectorises it."""
    if kind == SILU:
        return x * sigmoid(x)
    if kind == GELU:
        return HALF * x * (ONE + gelu_tanh(x))
    if kind == TANH:
        return tanh(x)
    r = ZERO if x <= ZERO else x  # NaN is not below zero and stays
    return r if kind == RELU else r * r


@inlined
def _f_df(kind, x):  # f, f'
    if kind == SILU:
        s = sigmoid(x)
        return x * s, s * (ONE + x * (ONE - s))
    if kind == GELU:
        t = gelu_tanh(x)
        du = GELU_K * (ONE + THREE * GELU_C * x * x)
        return HALF * x * (ONE + t), HALF * (ONE + t) + HALF * x * (ONE - t * t) * du
    if kind == TANH:
        t = tanh(x)
        return t, ONE - t * t
    r = ZERO if x <= ZERO else x
    if kind == RELU:
        return r, (ZERO if x <= ZERO else ONE)
    return r * r, TWO * r


@inlined
def _gate(kind, gate, up, h):  # (F,) each
    for i in range(len(h)):
        put(h, i, _f(kind, wide(gate[i])) * wide(up[i]))


@inlined
def _gate_backward(kind, dh, gate, up, dgate, dup):  # (F,) each
    for i in range(len(dh)):
        f, df = _f_df(kind, wide(gate[i]))
        put(dgate, i, wide(dh[i]) * wide(up[i]) * df)
        put(dup, i, wide(dh[i]) * f)


@inlined
def _activate(kind, x, y):  # (F,) each
    for i in range(len(y)):
        put(y, i, _f(kind, wide(x[i])))


@inlined
def _activate_backward(kind, dy, x, dx):  # (F,) each
    for i in range(len(x)):
        _, df = _f_df(kind, wide(x[i]))
        put(dx, i, wide(dy[i]) * df)


@kernel
def _gated_forward(kind, gate_up, h):  # (N, 2F), (N, F)
    N, F = h.shape
    for n in prange(N):
        _gate(kind, gate_up[n, :F], gate_up[n, F:], h[n])


@kernel
def _gated_backward(kind, dh, gate_up, dgate_up):  # (N, F), (N, 2F), (N, 2F)
    N, F = dh.shape
    for n in prange(N):
        _gate_backward(kind, dh[n], gate_up[n, :F], gate_up[n, F:], dgate_up[n, :F], dgate_up[n, F:])


@kernel
def _plain_forward(kind, x, y):  # (N, F) each
    for n in prange(len(x)):
        _activate(kind, x[n], y[n])


@kernel
def _plain_backward(kind, dy, x, dx):  # (N, F) each
    for n in prange(len(x)):
        _activate_backward(kind, dy[n], x[n], dx[n])


def _array(x: Tensor) -> Any:  # (N, F)
    return array(rows(x).contiguous())


def gated_forward(
    gate_up: Tensor,  # (..., 2F)
    *,
    kind: int,
    ws: Workspace,
) -> tuple[Tensor, GatedSaved]:  # h (..., F)
    h = ws.empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2), gate_up.dtype)
    _gated_forward(kind, _array(gate_up), _array(h))
    return h, GatedSaved(gate_up)


def gated_backward(
    dh: Tensor,  # (..., F)
    saved: GatedSaved,
    *,
    kind: int,
    ws: Workspace,
) -> Tensor:  # dgate_up (..., 2F)
    dgate_up = ws.empty(saved.gate_up.shape, dh.dtype)
    _gated_backward(kind, _array(dh), _array(saved.gate_up), _array(dgate_up))
    return dgate_up


def plain_forward(
    x: Tensor,  # (..., F)
    *,
    kind: int,
    ws: Workspace,
) -> tuple[Tensor, PointwiseSaved]:  # y (..., F)
    y = ws.empty(x.shape, x.dtype)
    _plain_forward(kind, _array(x), _array(y))
    return y, PointwiseSaved(x)


def plain_backward(
    dy: Tensor,  # (..., F)
    saved: PointwiseSaved,
    *,
    kind: int,
    ws: Workspace,
) -> Tensor:  # dx (..., F)
    dx = ws.empty(dy.shape, dy.dtype)
    _plain_backward(kind, _array(dy), _array(saved.x), _array(dx))
    return dx


def ffn_gates(ws: Workspace) -> dict[str, Op]:
    gated = {"swiglu": SILU, "geglu": GELU}
    plain = {"gelu": GELU, "tanh": TANH, "relu": RELU, "relu2": RELU2}
    return {
        **{n: Op(partial(gated_forward, kind=k, ws=ws), partial(gated_backward, kind=k, ws=ws)) for n, k in gated.items()},
        **{n: Op(partial(plain_forward, kind=k, ws=ws), partial(plain_backward, kind=k, ws=ws)) for n, k in plain.items()},
    }
