"""The result of a check: an error and its bound. Every level yields these; reports, tests and mutant runs read them."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Finding(NamedTuple):
    level: str  # L0 … L6
    check: str  # what was checked, such as `attention[gqa]` or `model[pre-rms-rope]`
    oracle: str  # what it was compared with, such as `complex step`
    tensor: str  # the gradient or value checked, such as `dk` or `blocks.0.attn.wq`
    error: float
    bound: float
    where: tuple[int, ...] | None = None  # index of the worst element, where the oracle has one

    @property
    def ok(self) -> bool:
        return self.error <= self.bound  # NaN is not within any bound

    def __str__(self) -> str:
        place = f" at {list(self.where)}" if self.where is not None else ""
        found = f"{self.error:.2e} (bound {self.bound:.0e}){place} {'ok' if self.ok else 'FAILED'}"
        return f"{self.level} {self.check} {self.tensor} by {self.oracle}: {found}"


class Distance(NamedTuple):
    """How far a claimed tensor is from the truth, relative to the truth."""

    largest: float  # max |claimed - truth| / max |truth|
    l2: float  # |claimed - truth| / |truth|
    where: tuple[int, ...]  # of the largest


def distance(claimed: Tensor, truth: Tensor, floor: float = 0.0) -> Distance:
    """Both norms of the difference. `floor` is the size below which a tensor counts as zero: the only absolute number, for
    gradients that are zero by identity. A NaN in either is an infinite distance."""
    if claimed.shape != truth.shape:
        raise ValueError(f"claimed has the shape {tuple(claimed.shape)}, truth {tuple(truth.shape)}")
    wide = torch.complex128 if claimed.is_complex() or truth.is_complex() else torch.float64
    a, b = claimed.detach().to("cpu", wide), truth.detach().to("cpu", wide)
    gap = (a - b).abs()
    gap = torch.where(torch.isnan(gap), torch.inf, gap)
    where = tuple(map(int, np.unravel_index(int(gap.argmax()), gap.shape)))  # torch's own loads sympy, 0.15 s of every start
    if not gap.max() > 0:
        return Distance(0.0, 0.0, where)
    scale, size = max(float(b.abs().max()), floor), max(float(b.norm()), floor)
    largest = float(gap.max()) / scale if scale else float("inf")
    l2 = float(gap.norm()) / size if size else float("inf")
    return Distance(largest, l2, where)
