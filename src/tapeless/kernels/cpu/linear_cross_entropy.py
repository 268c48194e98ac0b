"""The output matmul and its loss, in blocks of rows. The logits of a block are overwritten by their gradient.

Formulas: ops/cross_entropy.py. `both` runs forward and backward together: the logits of a block are computed once, and used for
the loss, dlogits, dx and dw. A separate backward recomputes the logits.
Tested by: tests/kernels/test_cpu.py."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from tapeless.kernels.cpu.capture import launch
from tapeless.kernels.cpu.functions import exp, tanh
from tapeless.kernels.cpu.jit import array, inlined, kernel, put, wide
from tapeless.kernels.cpu.linear import accumulate_matmul
from tapeless.kernels.cpu.matmul import ROWS, matmul
from tapeless.kernels.cpu.rows import largest
from tapeless.kernels.workspace import Workspace
from tapeless.ops.cross_entropy import IGNORED, valid_targets
from tapeless.ops.linear_cross_entropy import LINEAR_CROSS_ENTROPY, LinearCrossEntropySaved
from tapeless.ops.numerics import rows
from tapeless.ops.op import Op

BLOCK = 2**24  # logits in memory at a time; twice as many if that is fewer than ENOUGH rows
ENOUGH = 512  # rows: matmuls of fewer are slower, and dw is accumulated once per block
ZERO, ONE, TWO = np.float32(0), np.float32(1), np.float32(2)


@inlined
def _plain(x, cap):
    return x


@inlined
def _capped(x, cap):
    return cap * tanh(x / cap)


@inlined
def _through_plain(z, cap):
    return ONE


@inlined
def _through_cap(z, cap):  # the cap's derivative
    return ONE - (z / cap) * (z / cap)


def _row(capped: Any, through: Any) -> tuple[Any, Any]:
    """The passes over one row, with or without a cap: a loop without the branch is vectorised."""

    @inlined
    def sums(x, cap, top, smoothing):  # (V,): sum of exp(z - top), and of z if smoothing needs it
        exponentials, total = ZERO, ZERO
        for i in range(len(x)):
            exponentials += exp(capped(wide(x[i]), cap) - top)
        if smoothing > ZERO:
            for i in range(len(x)):
                total += capped(wide(x[i]), cap)
        return exponentials, total

    @inlined
    def loss(x, target, smoothing, z_loss, cap):  # (V,) -> loss, lse
        top = capped(largest(x), cap)
        exponentials, total = sums(x, cap, top, smoothing)
        lse = top + np.float32(math.log(exponentials))
        if target == IGNORED:
            return ZERO, lse
        hit = (ONE - smoothing) * capped(wide(x[target]), cap)
        return lse - hit - smoothing * total / np.float32(len(x)) + z_loss * lse * lse, lse

    @inlined
    def gradient(x, target, lse, scale, smoothing, z_loss, cap):  # (V,) in place: logits in, dlogits out
        if target == IGNORED:
            x[:] = 0
            return
        factor, spread = ONE + TWO * z_loss * lse, smoothing / np.float32(len(x))
        z_target = capped(wide(x[target]), cap)
        for i in range(len(x)):
            z = capped(wide(x[i]), cap)
            put(x, i, scale * (factor * exp(z - lse) - spread) * through(z, cap))
        dz = factor * exp(z_target - lse) - spread - (ONE - smoothing)
        put(x, target, scale * dz * through(z_target, cap))

    return loss, gradient


_loss, _gradient = _row(_plain, _through_plain)
_loss_capped, _gradient_capped = _row(_capped, _through_cap)


@kernel
def _losses(logits, targets, smoothing, z_loss, cap, losses, lse):  # (N, V), (N,); losses, lse (N,) float32
    for n in prange(len(logits)):
        if cap > ZERO:
            losses[n], lse[n] = _loss_capped(logits[n], targets[n], smoothing, z_loss, cap)
        else:
            losses[n], lse[n] = _loss(logits[n], targets[n], smoothing, z_loss, cap)


@kernel
def _gradients(logits, targets, lse, scale, smoothing, z_loss, cap):  # (N, V) in place, (N,), (N,)
    for n in prange(len(logits)):
        if cap > ZERO:
            _gradient_capped(logits[n], targets[n], lse[n], scale, smoothing, z_loss, cap)
        else:
            _gradient(logits[n], targets[n], lse[n], scale, smoothing, z_loss, cap)


@kernel
def _both(logits, targets, scale, smoothing, z_loss, cap, losses):  # (N, V) in place, (N,), (N,)
    """Each row is still in the cache when its gradient is computed."""
    for n in prange(len(logits)):
        if cap > ZERO:
            losses[n], lse = _loss_capped(logits[n], targets[n], smoothing, z_loss, cap)
            _gradient_capped(logits[n], targets[n], lse, scale, smoothing, z_loss, cap)
        else:
            losses[n], lse = _loss(logits[n], targets[n], smoothing, z_loss, cap)
            _gradient(logits[n], targets[n], lse, scale, smoothing, z_loss, cap)


def rows_of_logits(N: int, V: int) -> int:
    """How many of N rows are in memory at a time."""
    height = max(1, BLOCK // V, min(ENOUGH, 2 * BLOCK // V))
    height -= height % ROWS if height > ROWS else 0  # so that oneDNN may compute the matmuls
    return min(height, N)


def _blocks(
    x: Tensor,  # (..., C)
    targets: Tensor,  # (...)
    w: Tensor,  # (V, C)
    ws: Workspace,
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Which rows, their x (n, C), targets (n,) and logits (n, V)."""
    flat, y, V = rows(x), targets.reshape(-1).contiguous(), w.shape[0]
    height = rows_of_logits(len(flat), V)
    buffer = ws.empty((height, V), x.dtype)
    for first in range(0, len(flat), max(1, height)):
        which = slice(first, min(first + height, len(flat)))
        logits = buffer[: which.stop - first]
        matmul(flat[which], w.t(), logits)
        yield which, flat[which], y[which], logits


def _scalars(label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0) -> tuple[Any, ...]:
    return np.float32(label_smoothing), np.float32(z_loss), np.float32(softcap)


def linear_cross_entropy_forward(
    x: Tensor,  # (..., C)
    targets: Tensor,  # (...) int64; -100 is ignored
    w: Tensor,  # (V, C)
    *,
    num_targets: int | Tensor | None = None,
    ws: Workspace,
    **options: float,  # label_smoothing, z_loss, softcap
) -> tuple[Tensor, LinearCrossEntropySaved]:  # loss ()
    count = _count(num_targets, targets)
    losses = np.empty(targets.numel(), np.float32)
    lse = torch.empty(targets.numel(), 1, dtype=torch.float32, device=x.device)
    for which, _, y, logits in _blocks(x, targets, w, ws):
        scalars = _scalars(**options)
        launch(_losses, array(logits), array(y), *scalars, losses[which], array(lse[which, 0]))
    return _mean(losses, count, x.device), LinearCrossEntropySaved(x, targets, lse)


def linear_cross_entropy_backward(
    dloss: Tensor | float,  # ()
    saved: LinearCrossEntropySaved,
    w: Tensor,  # (V, C)
    dw: Tensor | None,  # (V, C)  accumulated into, or overwritten
    *,
    num_targets: int | Tensor | None = None,
    ws: Workspace,
    overwrite: bool,
    **options: float,  # label_smoothing, z_loss, softcap
) -> Tensor:  # dx (..., C)
    x, targets, lse = saved
    count = _count(num_targets, targets)
    dx = ws.empty(x.shape, x.dtype)
    for which, x_block, y, logits in _blocks(x, targets, w, ws):
        scalars = _scalars(**options)
        launch(_scaled, _gradients, (array(logits), array(y), array(lse[which, 0])), float(dloss), count, *scalars)
        _matmuls(logits, x_block, w, rows(dx)[which], dw, ws, overwrite and which.start == 0)
    return dx


def linear_cross_entropy_both(
    x: Tensor,  # (..., C)
    targets: Tensor,  # (...) int64; -100 is ignored
    w: Tensor,  # (V, C)
    dw: Tensor | None,  # (V, C)  accumulated into, or overwritten
    *,
    num_targets: int | Tensor | None = None,
    ws: Workspace,
    overwrite: bool,
    **options: float,  # label_smoothing, z_loss, softcap
) -> tuple[Tensor, Tensor]:  # loss (), dx (..., C)
    count = _count(num_targets, targets)
    losses = np.empty(targets.numel(), np.float32)
    dx = ws.empty(x.shape, x.dtype)
    scalars = _scalars(**options)
    for which, x_block, y, logits in _blocks(x, targets, w, ws):
        launch(_scaled, _both, (array(logits), array(y)), 1.0, count, *scalars, losses[which])
        _matmuls(logits, x_block, w, rows(dx)[which], dw, ws, overwrite and which.start == 0)
    return _mean(losses, count, x.device), dx


def _count(num_targets: int | Tensor | None, targets: Tensor) -> int | np.ndarray:
    """The divisor of the loss. As an array () it is read at each replay."""
    return array(num_targets) if isinstance(num_targets, Tensor) else num_targets or valid_targets(targets)


def _scaled(run: Any, arrays: tuple[np.ndarray, ...], dloss: float, count: int | np.ndarray, *others: Any) -> None:
    run(*arrays, np.float32(dloss / float(count)), *others)


def _mean(losses: np.ndarray, count: int | np.ndarray, device: torch.device) -> Tensor:  # ()
    loss = torch.empty((), dtype=torch.float32, device=device)
    launch(_write_mean, losses, count, array(loss))
    return loss


def _write_mean(losses: np.ndarray, count: int | np.ndarray, loss: np.ndarray) -> None:  # (N,), scalar or (), ()
    loss[...] = losses.sum(dtype=np.float64) / float(count)


def _matmuls(dlogits: Tensor, x: Tensor, w: Tensor, dx: Tensor, dw: Tensor | None, ws: Workspace, overwrite: bool) -> None:
    matmul(dlogits, w, dx)
    if dw is not None:
        accumulate_matmul(dw, dlogits.t(), x, ws, overwrite)


def linear_cross_entropy(ws: Workspace, *, overwrite: bool = False) -> Op:
    return LINEAR_CROSS_ENTROPY._replace(
        forward=partial(linear_cross_entropy_forward, ws=ws),
        backward=partial(linear_cross_entropy_backward, ws=ws, overwrite=overwrite),
        both=partial(linear_cross_entropy_both, ws=ws, overwrite=overwrite),
    )
