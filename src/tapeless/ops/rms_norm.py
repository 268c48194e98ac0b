"""RMSNorm.                                              letters: docs/notation.md

    r = (mean_C(x^2) + eps)^(-1/2)     n = x r     y = n w
Backward. dn = dy w;  dr/dx_j = -r^3 x_j / C, hence
    dx = r (dn - n mean_C(dn n))       dw += sum_rows(dy n)
Saved: x and r (one number per row); n is one multiply, so it is recomputed.
Tested by: tests/ops/test_rms_norm.py."""

from typing import NamedTuple

import torch
from torch import Tensor

from tapeless.ops.numerics import accumulation_dtype, add_row_sum
from tapeless.ops.op import Op


class RMSNormSaved(NamedTuple):
    x: Tensor  # (..., C)
    r: Tensor  # (..., 1)  accumulation dtype


def rms_norm_forward(
    x: Tensor,  # (..., C)
    w: Tensor,  # (C,)
    *,
    eps: float,
) -> tuple[Tensor, RMSNormSaved]:  # y (..., C)
    xa = x.to(accumulation_dtype(x))
    r = torch.rsqrt((xa * xa).mean(-1, keepdim=True) + eps)
    return (xa * r * w).to(x.dtype), RMSNormSaved(x, r)


def rms_norm_backward(
    dy: Tensor,  # (..., C)
    saved: RMSNormSaved,
    w: Tensor,  # (C,)
    dw: Tensor | None,  # (C,)  accumulated into
) -> Tensor:  # dx (..., C)
    x, r = saved
    n = x.to(r.dtype) * r
    if dw is not None:
        add_row_sum(dw, dy * n)
    dn = dy.to(r.dtype) * w
    return (r * (dn - n * (dn * n).mean(-1, keepdim=True))).to(x.dtype)


RMS_NORM = Op(rms_norm_forward, rms_norm_backward)
