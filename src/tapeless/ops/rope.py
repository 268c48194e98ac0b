"""Rotary positions, half-split: feature i is rotated with feature i + D/2, as in Hugging Face's Llama.

    angle[t, i] = (offset + t) theta^(-2i/D)        i = 0 … D/2 - 1
    y_lo = x_lo cos - x_hi sin                      lo: features 0 … D/2 - 1
    y_hi = x_hi cos + x_lo sin                      hi: features D/2 … D - 1
Backward. A rotation's transpose is its inverse, the rotation by -angle:
    dx_lo = dy_lo cos + dy_hi sin                   dx_hi = dy_hi cos - dy_lo sin
Saved: nothing; the angles depend on the position alone. They are computed in float64, since at offset 10^5 a float32 angle
is off by 1e-2.
Tested by: tests/ops/test_rope.py."""

import torch
from torch import Tensor

from tapeless.errors import ConfigError
from tapeless.ops.numerics import accumulation_dtype
from tapeless.ops.op import Op


def rope_tables(x: Tensor, theta: float, offset: int) -> tuple[Tensor, Tensor]:  # cos, sin (T, D/2)
    T, D = x.shape[-2:]
    if D % 2:
        raise ConfigError(f"rotary positions rotate pairs of features, but head_dim is {D}; make it even")
    # mps has no float64, and on the meta device torch would load its compiler for arange.
    where = "cpu" if x.device.type in ("mps", "meta") else x.device
    i = torch.arange(0, D, 2, dtype=torch.float64, device=where)
    t = torch.arange(offset, offset + T, dtype=torch.float64, device=where)
    angle = t[:, None] * theta ** (-i / D)
    dtype = torch.float64 if x.is_complex() else accumulation_dtype(x)
    return angle.cos().to(x.device, dtype), angle.sin().to(x.device, dtype)


def rope_forward(
    x: Tensor,  # (..., T, D)
    *,
    theta: float,
    offset: int = 0,
) -> tuple[Tensor, None]:  # y (..., T, D)
    cos, sin = rope_tables(x, theta, offset)
    lo, hi = x.chunk(2, -1)
    return torch.cat([lo * cos - hi * sin, hi * cos + lo * sin], -1).to(x.dtype), None


def rope_backward(
    dy: Tensor,  # (..., T, D)
    saved: None,
    *,
    theta: float,
    offset: int = 0,
) -> Tensor:  # dx (..., T, D)
    cos, sin = rope_tables(dy, theta, offset)
    dlo, dhi = dy.chunk(2, -1)
    return torch.cat([dlo * cos + dhi * sin, dhi * cos - dlo * sin], -1).to(dy.dtype)


ROPE = Op(rope_forward, rope_backward)
