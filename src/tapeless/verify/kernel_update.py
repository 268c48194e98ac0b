"""The optimizer's kernels of a set, each compared with its formula in float64 (L1).

Buffers longer than a kernel's blocks and not a multiple of them, parameters with and without decay, a clipping factor, several
steps. If a set can be captured, a factor of NaN must leave every bit unchanged.
Tested by: tests/verify/test_kernel_update.py."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tapeless.ops.op import OpSet
from tapeless.optim.adamw import PIECE, AdamW
from tapeless.verify.finding import Finding, distance
from tapeless.verify.tolerances import OP_FLOAT32

UPDATE = 4e-6  # relative: a beta that was rounded before it is subtracted from 1 would be 1e-5 off
SIZES = {"a": 2 * PIECE + 7, "b": 33, "c": PIECE - 1, "d": 5}  # a and c decay
DECAY = ("a", "c")
STEPS, SCALE, LR, DECAY_RATE, BETA2 = 3, 0.25, 1e-2, 0.3, 0.999


def update_findings(ops: OpSet, device: str) -> Iterator[Finding]:
    if ops.grad_norm is not None:
        yield from norm_findings(ops, device)
    if ops.adam_update is not None:
        yield from adam_findings(ops, device)


def norm_findings(ops: OpSet, device: str) -> Iterator[Finding]:
    assert ops.grad_norm is not None
    for size in (1, PIECE, 3 * PIECE + 5):
        x = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(device)
        gap = distance(ops.grad_norm(x).view(1), x.double().norm().view(1))
        yield Finding("L1", f"grad_norm[{size}]", "float64", "norm", gap.largest, OP_FLOAT32)
        x[size // 2] = torch.nan
        passed = bool(ops.grad_norm(x).isnan())
        yield Finding("L1", f"grad_norm[{size}]", "NaN passes", "norm", float(not passed), 0.0)


def adam_findings(ops: OpSet, device: str) -> Iterator[Finding]:
    generator = torch.Generator().manual_seed(0)
    flat, grads = (1e-2 * torch.randn(sum(SIZES.values()), generator=generator).to(device) for _ in range(2))
    start, copy = flat.clone(), torch.zeros_like(flat, dtype=torch.bfloat16)
    optimizer = AdamW(
        _views(flat), _views(grads), lr=LR, weight_decay=DECAY_RATE, beta2=BETA2, decay=DECAY, fused=ops.adam_update
    )
    truth = _Float64(start)
    for step in range(STEPS):
        grads.copy_(torch.randn(flat.shape, generator=generator))
        optimizer.step(scale=SCALE, copy=copy)
        truth.step(step + 1, SCALE * grads.double(), optimizer)
    moments = zip(("exp_avg", "exp_avg_sq"), (truth.m, truth.v), strict=True)
    found = {"p": (flat.double() - start, truth.p - start), **{name: (optimizer.state[name], true) for name, true in moments}}
    for name, (claimed, true) in found.items():
        gap = distance(claimed, true)
        yield Finding("L1", "adam_update", "float64", name, gap.largest, UPDATE, gap.where)
    yield Finding("L1", "adam_update", "the copy is p, rounded", "copy", float(not torch.equal(copy, flat.bfloat16())), 0.0)
    if ops.capture is not None:
        before = [x.clone() for x in (flat, copy, *optimizer.state.values())]
        optimizer.step(scale=math.nan, copy=copy)
        same = all(torch.equal(x, y) for x, y in zip(before, (flat, copy, *optimizer.state.values()), strict=True))
        yield Finding("L1", "adam_update", "NaN leaves everything as it was", "p", float(not same), 0.0)


def _views(flat: Tensor) -> dict[str, Tensor]:
    return dict(zip(SIZES, flat.split(list(SIZES.values())), strict=True))


class _Float64:
    """AdamW in float64."""

    def __init__(self, start: Tensor):
        self.p, self.m, self.v = start.double(), torch.zeros_like(start.double()), torch.zeros_like(start.double())
        decays = {name: torch.full((size,), name in DECAY) for name, size in SIZES.items()}
        self.decays = torch.cat(list(decays.values())).to(start.device)

    def step(self, t: int, g: Tensor, by: AdamW) -> None:
        self.p = torch.where(self.decays, self.p - by.lr * by.weight_decay * self.p, self.p)
        self.m = by.beta1 * self.m + (1 - by.beta1) * g
        self.v = by.beta2 * self.v + (1 - by.beta2) * g**2
        m, v = self.m / (1 - by.beta1**t), self.v / (1 - by.beta2**t)
        self.p = self.p - by.lr * m / (v**0.5 + by.eps)
