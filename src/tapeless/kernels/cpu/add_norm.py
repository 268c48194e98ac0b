"""RMSNorm and LayerNorm, by themselves and with the residual sum before them: each row is read once, each way.

    s = x + delta, rounded to its dtype      m = mean_C(s), 0 for RMSNorm      r = (mean_C((s - m)^2) + eps)^(-1/2)
    n = (s - m) r w + b
Backward: ops/rms_norm.py, ops/layer_norm.py and ops/add_norm.py. dw and db are summed within PARTS spans of rows, then over
the spans, so that the sum does not depend on the number of threads.
Tested by: tests/kernels/test_cpu.py."""

from functools import partial
from math import sqrt
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from tapeless.kernels.cpu.capture import launch
from tapeless.kernels.cpu.jit import array, inlined, kernel, matrix, put, wide
from tapeless.kernels.workspace import Workspace
from tapeless.ops.add_norm import ADD_RMS_NORM, AddNormSaved
from tapeless.ops.layer_norm import LayerNormSaved
from tapeless.ops.op import Op
from tapeless.ops.rms_norm import RMSNormSaved

PARTS = 16
ZERO = np.float32(0)
NO_GRAD = np.empty(0, np.float32)


@inlined
def _add(x, delta, s):  # (C,) each
    for c in range(len(x)):
        put(s, c, wide(x[c]) + wide(delta[c]))


@inlined
def _sum(x):  # (C,)
    total = ZERO
    for c in range(len(x)):
        total += wide(x[c])
    return total


@inlined
def _sum_of_squares(x, m):  # (C,)
    total = ZERO
    for c in range(len(x)):
        centred = wide(x[c]) - m
        total += centred * centred
    return total


@inlined
def _scale(x, m, r, w, y):  # (C,) each
    for c in range(len(x)):
        put(y, c, (wide(x[c]) - m) * r * wide(w[c]))


@inlined
def _scale_shift(x, m, r, w, b, y):  # (C,) each
    for c in range(len(x)):
        put(y, c, (wide(x[c]) - m) * r * wide(w[c]) + wide(b[c]))


@kernel
def _forward(x, delta, w, b, eps, centre, s, n, m, r):  # x, delta, s, n (N, C); w, b (C,); m, r (N,)
    N, C = x.shape
    for i in prange(N):
        row = x[i]
        if len(delta) > 0:
            row = s[i]
            _add(x[i], delta[i], row)
        mean = _sum(row) / np.float32(C) if centre else ZERO
        rstd = np.float32(1) / np.float32(sqrt(_sum_of_squares(row, mean) / np.float32(C) + eps))
        if len(b) > 0:
            _scale_shift(row, mean, rstd, w, b, n[i])
        else:
            _scale(row, mean, rstd, w, n[i])
        r[i] = rstd
        if centre:
            m[i] = mean


@inlined
def _row_sums(dy, x, m, r, w):  # (C,) each
    """sum_C(dn) and sum_C(dn n)."""
    total, against = ZERO, ZERO
    for c in range(len(x)):
        dn = wide(dy[c]) * wide(w[c])
        total += dn
        against += dn * ((wide(x[c]) - m) * r)
    return total, against


@inlined
def _row_gradient(dy, x, m, r, w, mean, against, ds, dx):  # (C,) each
    for c in range(len(x)):
        n = (wide(x[c]) - m) * r
        put(dx, c, r * (wide(dy[c]) * wide(w[c]) - mean - n * against) + wide(ds[c]))


@inlined
def _row_gradient_alone(dy, x, m, r, w, mean, against, dx):  # (C,) each
    for c in range(len(x)):
        n = (wide(x[c]) - m) * r
        put(dx, c, r * (wide(dy[c]) * wide(w[c]) - mean - n * against))


@inlined
def _param_gradients(dy, x, m, r, dw, db):  # (C,) each
    for c in range(len(x)):
        dw[c] += wide(dy[c]) * ((wide(x[c]) - m) * r)
        db[c] += wide(dy[c])


@inlined
def add_parts(parts, total):  # (PARTS, C), (C,) or (0,)
    for c in range(len(total)):
        summed = ZERO
        for part in range(len(parts)):
            summed += parts[part, c]
        total[c] += summed


@kernel
def _backward(ds, dy, x, m, r, w, centre, dx, sums, dw, db):
    # ds, dy, x, dx (N, C); m, r (N,); w (C,); sums (2, PARTS, C); dw, db (C,), or (0,)
    N, C = x.shape
    for part in prange(PARTS):
        sums[:, part] = ZERO
        for i in range(N * part // PARTS, N * (part + 1) // PARTS):
            mean = m[i] if centre else ZERO
            total, against = _row_sums(dy[i], x[i], mean, r[i], w)
            total = total / np.float32(C) if centre else ZERO
            against = against / np.float32(C)
            if len(ds) > 0:
                _row_gradient(dy[i], x[i], mean, r[i], w, total, against, ds[i], dx[i])
            else:
                _row_gradient_alone(dy[i], x[i], mean, r[i], w, total, against, dx[i])
            _param_gradients(dy[i], x[i], mean, r[i], sums[0, part], sums[1, part])
    add_parts(sums[0], dw)
    add_parts(sums[1], db)


def _nothing(like: np.ndarray) -> np.ndarray:
    """For an argument that is None: no rows of `like`."""
    return like[:0]


def add_norm_forward(
    x: Tensor,  # (..., C)
    delta: Tensor | None,  # (..., C)
    w: Tensor,  # (C,)
    b: Tensor | None = None,  # (C,)
    *,
    eps: float,
    centre: bool,
    ws: Workspace,
) -> tuple[Tensor, Tensor, AddNormSaved]:  # s (..., C), n (..., C)
    s = x if delta is None else ws.empty(x.shape, x.dtype)
    n = ws.empty(x.shape, x.dtype)
    r = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    m = torch.empty_like(r) if centre else r
    x_, w_ = matrix(x), array(w)
    delta_, s_ = (_nothing(x_), _nothing(x_)) if delta is None else (matrix(delta), matrix(s))
    b_ = _nothing(w_) if b is None else array(b)
    m_, r_ = array(m).reshape(-1), array(r).reshape(-1)
    launch(_forward, x_, delta_, w_, b_, np.float32(eps), centre, s_, matrix(n), m_, r_)
    return s, n, AddNormSaved(LayerNormSaved(s, m, r) if centre else RMSNormSaved(s, r))


def add_norm_backward(
    ds: Tensor | None,  # (..., C)
    dn: Tensor,  # (..., C)
    saved: AddNormSaved,
    w: Tensor,  # (C,)
    *params_and_grads: Tensor | None,  # for RMSNorm dw (C,); for LayerNorm b, dw, db; gradients accumulated into
    centre: bool,
    ws: Workspace,
) -> Tensor:  # dx (..., C), which is ddelta too
    x, r = saved.norm.x, saved.norm.r
    m = saved.norm.m if centre else r
    dw, db = params_and_grads[1:] if centre else (params_and_grads[0], None)
    dx = ws.empty(x.shape, x.dtype)
    x_, sums = matrix(x), np.empty((2, PARTS, x.shape[-1]), np.float32)
    ds_ = _nothing(x_) if ds is None else matrix(ds)
    m_, r_ = array(m).reshape(-1), array(r).reshape(-1)
    dw_, db_ = (NO_GRAD if grad is None else array(grad) for grad in (dw, db))
    launch(_backward, ds_, matrix(dn), x_, m_, r_, array(w), centre, matrix(dx), sums, dw_, db_)
    return dx


def add_norm(centre: bool, ws: Workspace) -> Op:
    options: dict[str, Any] = {"centre": centre, "ws": ws}
    return ADD_RMS_NORM._replace(forward=partial(add_norm_forward, **options), backward=partial(add_norm_backward, **options))
