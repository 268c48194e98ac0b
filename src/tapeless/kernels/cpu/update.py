"""The optimizer's passes over the flat buffers: the gradient norm, and Adam's update with clipping and weight decay.

Formulas: optim/adam.py and optim/clip.py. One pass reads p, g, m and v, applies clipping and decay, and writes p, m, v and
the copy in the compute dtype.
Tested by: tests/kernels/cpu/test_update.py."""

from math import sqrt

import numpy as np
import torch
from numba import prange
from torch import Tensor

from tapeless.kernels.cpu.capture import launch
from tapeless.kernels.cpu.jit import array, inlined, kernel, narrow

SPAN = 2**14  # gradients summed in float32; the sums of spans in float64: the same for any number of threads
ONE = np.float32(1)


@inlined
def _sum_of_squares(x):  # (n,)
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i] * x[i]
    return total


@kernel
def _sums_of_squares(x, sums):  # (n,), (spans,) float64
    for span in prange(len(sums)):
        sums[span] = _sum_of_squares(x[span * SPAN : min(len(x), (span + 1) * SPAN)])


def grad_norm(
    grads: Tensor,  # (n,) flat
) -> Tensor:  # () float64
    sums = np.empty(-(-len(grads) // SPAN), dtype=np.float64)
    launch(_sums_of_squares, array(grads), sums)
    return torch.from_numpy(sums).sum().sqrt()


@inlined
def _adam(p, g, m, v, scale, shrink, rate, rest1, beta2, rest2, correction, eps):
    # (n,) each; rest1 and rest2 are 1 - beta1 and 1 - beta2
    for i in range(len(p)):
        d = g[i] * scale
        m[i] = m[i] + rest1 * (d - m[i])
        v[i] = beta2 * v[i] + rest2 * d * d
        p[i] = p[i] * shrink - rate * m[i] / (np.float32(sqrt(v[i])) * correction + eps)


@inlined
def _round(p, copy):  # (n,) each
    for i in range(len(p)):
        copy[i] = narrow(p[i])


@kernel
def _adam_pieces(pieces, p, g, m, v, copy, scale, shrink, rate, rest1, beta2, rest2, correction, eps):
    # pieces (k, 3): from, to, whether it decays; the flat buffers (n,); copy (n,) bfloat16, or (0,)
    for k in prange(len(pieces)):
        first, last, decays = pieces[k]
        mine = p[first:last]
        factor = shrink if decays else ONE
        _adam(mine, g[first:last], m[first:last], v[first:last], scale, factor, rate, rest1, beta2, rest2, correction, eps)
        if len(copy) > 0:
            _round(mine, copy[first:last])


def _adam_unless_nan(pieces, p, g, m, v, copy, scale, step_scalars):  # as adam_update
    if scale == scale:
        _adam_pieces(pieces, p, g, m, v, copy, np.float32(scale), *step_scalars)


def adam_update(
    p: Tensor,  # (n,) float32, as are g, m and v
    g: Tensor,  # (n,)
    m: Tensor,  # (n,)
    v: Tensor,  # (n,)
    copy: Tensor | None,  # (n,) bfloat16: receives p
    pieces: Tensor,  # (k, 3) int64: from, to, whether it decays
    step_scalars: Tensor,  # (7,) float32: 1 - lr wd, lr / (1 - b1^t), 1 - b1, b2, 1 - b2, 1 / (1 - b2^t)^(1/2), eps
    scale: Tensor,  # () float32, of the gradients; NaN: nothing is updated
) -> None:
    buffers = (array(x) for x in (p, g, m, v))
    target = array(p.new_empty(0, dtype=torch.bfloat16) if copy is None else copy)
    launch(_adam_unless_nan, array(pieces), *buffers, target, array(scale), array(step_scalars))
    p[:0].zero_()  # increments torch's version counter, which does not see the kernel's writes
