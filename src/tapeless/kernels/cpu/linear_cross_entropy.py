"""The output product and its loss, a block of rows at a time. Within a block the logits turn into their gradient in place.

Formulas: ops/cross_entropy.py. `both` runs forward and backward together: the logits of a block are computed once, and while they
are there become the loss, dlogits, dx and dw. Apart from each other, backward computes the logits again.
Judged by: tests/kernels/test_cpu.py."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from tapeless.kernels.cpu.functions import exp, tanh
from tapeless.kernels.cpu.jit import array, inlined, kernel, largest, put, wide
from tapeless.kernels.cpu.linear import add_product
from tapeless.kernels.workspace import Workspace
from tapeless.ops.cross_entropy import IGNORED, valid_targets
from tapeless.ops.linear_cross_entropy import LinearCrossEntropySaved
from tapeless.ops.numerics import rows
from tapeless.ops.op import Op

BLOCK = 2**24  # logits alive at a time: products of fewer rows are slower
ZERO, ONE, TWO = np.float32(0), np.float32(1), np.float32(2)


@inlined
def _capped(x, cap):
    return cap * tanh(x / cap) if cap > ZERO else x


@inlined
def _sum_of_exponentials(x, cap, top):  # (V,)
    total = ZERO
    for i in range(len(x)):
        total += exp(_capped(wide(x[i]), cap) - top)
    return total


@inlined
def _sum(x, cap):  # (V,)
    total = ZERO
    for i in range(len(x)):
        total += _capped(wide(x[i]), cap)
    return total


@inlined
def _gradient(x, cap, lse, factor, smoothing, scale):  # (V,) in place: logits in, dlogits out, as if no target were there
    for i in range(len(x)):
        z = _capped(wide(x[i]), cap)
        dz = factor * exp(z - lse) - smoothing
        through = ONE - (z / cap) * (z / cap) if cap > ZERO else ONE
        put(x, i, scale * dz * through)


@kernel
def _losses(logits, targets, smoothing, z_loss, cap, losses, lse):  # (N, V), (N,); losses, lse (N,) float32
    N, V = logits.shape
    for n in prange(N):
        row = logits[n]
        top = _capped(largest(row), cap)
        lse[n] = top + np.float32(math.log(_sum_of_exponentials(row, cap, top)))
        target = targets[n]
        if target == IGNORED:
            losses[n] = ZERO
        else:
            loss = lse[n] - (ONE - smoothing) * _capped(wide(row[target]), cap) + z_loss * lse[n] * lse[n]
            if smoothing > ZERO:
                loss -= smoothing * _sum(row, cap) / np.float32(V)
            losses[n] = loss


@kernel
def _gradients(logits, targets, lse, scale, smoothing, z_loss, cap):  # (N, V) in place, (N,), (N,)
    N, V = logits.shape
    for n in prange(N):
        row, target = logits[n], targets[n]
        if target == IGNORED:
            row[:] = 0
        else:
            z = _capped(wide(row[target]), cap)
            factor = ONE + TWO * z_loss * lse[n]
            _gradient(row, cap, lse[n], factor, smoothing / np.float32(V), scale)
            through = ONE - (z / cap) * (z / cap) if cap > ZERO else ONE
            dz = factor * exp(z - lse[n]) - smoothing / np.float32(V) - (ONE - smoothing)
            put(row, target, scale * dz * through)


def _blocks(
    x: Tensor,  # (..., C)
    targets: Tensor,  # (...)
    w: Tensor,  # (V, C)
    ws: Workspace,
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Which rows, their x (n, C), targets (n,) and logits (n, V)."""
    flat, y, V = rows(x), targets.reshape(-1).contiguous(), w.shape[0]
    height = max(1, BLOCK // V)
    buffer = ws.empty((min(height, len(flat)), V), x.dtype)
    for first in range(0, len(flat), height):
        which = slice(first, min(first + height, len(flat)))
        logits = buffer[: which.stop - first]
        torch.mm(flat[which], w.t(), out=logits)
        yield which, flat[which], y[which], logits


def _numbers(label_smoothing: float, z_loss: float, softcap: float) -> tuple[Any, ...]:
    return np.float32(label_smoothing), np.float32(z_loss), np.float32(softcap)


def linear_cross_entropy_forward(
    x: Tensor,  # (..., C)
    targets: Tensor,  # (...) int64; -100 is ignored
    w: Tensor,  # (V, C)
    *,
    num_targets: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    ws: Workspace,
) -> tuple[Tensor, LinearCrossEntropySaved]:  # loss ()
    count = num_targets or valid_targets(targets)
    losses, lse = torch.empty(targets.numel()), torch.empty(targets.numel(), 1)
    for which, _, y, logits in _blocks(x, targets, w, ws):
        numbers = _numbers(label_smoothing, z_loss, softcap)
        _losses(array(logits), array(y), *numbers, array(losses[which]), array(lse[which, 0]))
    return losses.sum(dtype=torch.float64).div(count).float(), LinearCrossEntropySaved(x, targets, lse)


def linear_cross_entropy_backward(
    dloss: Tensor | float,  # ()
    saved: LinearCrossEntropySaved,
    w: Tensor,  # (V, C)
    dw: Tensor | None,  # (V, C)  accumulated into
    *,
    num_targets: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    ws: Workspace,
) -> Tensor:  # dx (..., C)
    x, targets, lse = saved
    scale = np.float32(float(dloss) / (num_targets or valid_targets(targets)))
    dx = ws.empty(x.shape, x.dtype)
    for which, x_block, y, logits in _blocks(x, targets, w, ws):
        _gradients(array(logits), array(y), array(lse[which, 0]), scale, *_numbers(label_smoothing, z_loss, softcap))
        _products(logits, x_block, w, rows(dx)[which], dw, ws)
    return dx


def linear_cross_entropy_both(
    x: Tensor,  # (..., C)
    targets: Tensor,  # (...) int64; -100 is ignored
    w: Tensor,  # (V, C)
    dw: Tensor | None,  # (V, C)  accumulated into
    *,
    num_targets: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    ws: Workspace,
) -> tuple[Tensor, Tensor]:  # loss (), dx (..., C)
    count = num_targets or valid_targets(targets)
    losses, lse = torch.empty(targets.numel()), torch.empty(targets.numel())
    dx = ws.empty(x.shape, x.dtype)
    numbers = _numbers(label_smoothing, z_loss, softcap)
    for which, x_block, y, logits in _blocks(x, targets, w, ws):
        _losses(array(logits), array(y), *numbers, array(losses[which]), array(lse[which]))
        _gradients(array(logits), array(y), array(lse[which]), np.float32(1 / count), *numbers)
        _products(logits, x_block, w, rows(dx)[which], dw, ws)
    return losses.sum(dtype=torch.float64).div(count).float(), dx


def _products(dlogits: Tensor, x: Tensor, w: Tensor, dx: Tensor, dw: Tensor | None, ws: Workspace) -> None:
    torch.mm(dlogits, w, out=dx)
    if dw is not None:
        add_product(dw, dlogits.t(), x, ws)


def linear_cross_entropy(ws: Workspace) -> Op:
    forward, backward = partial(linear_cross_entropy_forward, ws=ws), partial(linear_cross_entropy_backward, ws=ws)
    return Op(forward, backward, partial(linear_cross_entropy_both, ws=ws))
