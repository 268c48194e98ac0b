"""Logit soft-cap: a smooth limit of values to ±cap.

    y = cap tanh(x / cap)
Backward. dy/dx = 1 - tanh^2, hence
    dx = dy (1 - (y / cap)^2)
Saved: y.
Tested by: tests/ops/test_softcap.py."""

from typing import NamedTuple

import torch
from torch import Tensor

from tapeless.ops.numerics import accumulation_dtype
from tapeless.ops.op import Op


class SoftcapSaved(NamedTuple):
    y: Tensor  # any shape


def softcap_forward(
    x: Tensor,  # any shape
    *,
    cap: float,
) -> tuple[Tensor, SoftcapSaved]:  # y, the shape of x
    y = (cap * torch.tanh(x.to(accumulation_dtype(x)) / cap)).to(x.dtype)
    return y, SoftcapSaved(y)


def softcap_backward(
    dy: Tensor,  # any shape
    saved: SoftcapSaved,
    *,
    cap: float,
) -> Tensor:  # dx, the shape of dy
    t = saved.y.to(accumulation_dtype(dy)) / cap
    return (dy * (1 - t * t)).to(dy.dtype)


SOFTCAP = Op(softcap_forward, softcap_backward)
