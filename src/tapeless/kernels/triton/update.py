"""The optimizer's passes over the flat buffers: the gradient norm, and Adam's update with clipping and weight decay.

Formulas: optim/adam.py and optim/clip.py. One pass reads p, g, m and v, and writes p, m, v and the copy in the compute dtype.
Scalars that change from step to step (learning rate, bias corrections, clipping factor) are read from the device's memory, so
that a graph can be captured once; with a clipping factor of NaN nothing is updated.
Tested by: tests/kernels/triton/test_triton.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapeless.kernels.triton.launch import launch, on_device

SPAN = 2**14  # gradients that a program sums in float32; the programs' sums are added in float64
WIDTH, WARPS = 1024, 8  # elements that a program holds at a time


@triton.jit
def _sums_of_squares_kernel(x, sums, N, SPAN: tl.constexpr, WIDTH: tl.constexpr):  # (N,), (programs,) float32
    start = tl.program_id(0).to(tl.int64) * SPAN
    total = tl.zeros([WIDTH], tl.float32)
    for first in range(0, SPAN, WIDTH):
        at = start + first + tl.arange(0, WIDTH)
        v = tl.load(x + at, mask=at < N, other=0.0)
        total += v * v
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


@on_device
def grad_norm(
    grads: Tensor,  # (n,) flat
) -> Tensor:  # () float64
    programs = triton.cdiv(len(grads), SPAN)
    sums = torch.empty(programs, dtype=torch.float32, device=grads.device)
    launch(_sums_of_squares_kernel, (programs,), grads, sums, len(grads), SPAN=SPAN, WIDTH=WIDTH, num_warps=8)
    return sums.sum(dtype=torch.float64).sqrt()


@triton.jit
def _adam_kernel(pieces, p, g, m, v, copy, step_scalars, scale, HAS_COPY: tl.constexpr, WIDTH: tl.constexpr):
    # pieces (k, 3) int64: from, to, whether it decays; the flat buffers (n,); step_scalars (7,), scale () float32
    piece = pieces + tl.program_id(0) * 3
    start, end, decays = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    factor = tl.load(scale)
    shrink, rate, one_minus_beta1 = tl.load(step_scalars), tl.load(step_scalars + 1), tl.load(step_scalars + 2)
    beta2, one_minus_beta2 = tl.load(step_scalars + 3), tl.load(step_scalars + 4)
    correction, eps = tl.load(step_scalars + 5), tl.load(step_scalars + 6)
    shrink = tl.where(decays != 0, shrink, 1.0)
    if factor == factor:
        for first in range(start, end, WIDTH):
            at = first + tl.arange(0, WIDTH)
            inside = at < end
            d = tl.load(g + at, mask=inside, other=0.0) * factor
            m_ = tl.load(m + at, mask=inside, other=0.0)
            m_ += one_minus_beta1 * (d - m_)
            v_ = beta2 * tl.load(v + at, mask=inside, other=0.0) + one_minus_beta2 * d * d
            p_ = tl.load(p + at, mask=inside, other=0.0) * shrink - rate * m_ / (tl.sqrt(v_) * correction + eps)
            tl.store(m + at, m_, mask=inside)
            tl.store(v + at, v_, mask=inside)
            tl.store(p + at, p_, mask=inside)
            if HAS_COPY:
                tl.store(copy + at, p_.to(copy.dtype.element_ty), mask=inside)


@on_device
def adam_update(
    p: Tensor,  # (n,) float32, as are g, m and v
    g: Tensor,  # (n,)
    m: Tensor,  # (n,)
    v: Tensor,  # (n,)
    copy: Tensor | None,  # (n,) bfloat16: receives p
    pieces: Tensor,  # (k, 3) int64: from, to, whether it decays
    step_scalars: Tensor,  # (7,) float32: 1 - lr wd, lr / (1 - b1^t), 1 - b1, b2, 1 - b2, 1 / (1 - b2^t)^(1/2), eps
    scale: Tensor,  # () float32, of the gradients
) -> None:
    target = p if copy is None else copy
    launch(
        _adam_kernel, (len(pieces),), pieces, p, g, m, v, target, step_scalars, scale,
        inplace=(p, m, v), HAS_COPY=copy is not None, WIDTH=WIDTH, num_warps=WARPS,
    )  # fmt: skip
    p[:0].zero_()  # increments torch's version counter, which does not see the kernel's writes
