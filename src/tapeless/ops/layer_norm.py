"""LayerNorm, bias optional.                             letters: docs/notation.md

    m = mean_C(x)     r = (mean_C((x - m)^2) + eps)^(-1/2)     n = (x - m) r     y = n w + b
Backward. dn = dy w.  n depends on x directly, through m and through r:
    dx = r (dn - mean_C(dn) - n mean_C(dn n))
    dw += sum_rows(dy n)     db += sum_rows(dy)
Saved: x, m and r (two numbers per row); n is recomputed.
Tested by: tests/ops/test_layer_norm.py."""

from typing import NamedTuple

import torch
from torch import Tensor

from tapeless.ops.numerics import accumulation_dtype, add_row_sum
from tapeless.ops.op import Op


class LayerNormSaved(NamedTuple):
    x: Tensor  # (..., C)
    m: Tensor  # (..., 1)  accumulation dtype
    r: Tensor  # (..., 1)  accumulation dtype


def layer_norm_forward(
    x: Tensor,  # (..., C)
    w: Tensor,  # (C,)
    b: Tensor | None,  # (C,)
    *,
    eps: float,
) -> tuple[Tensor, LayerNormSaved]:  # y (..., C)
    xa = x.to(accumulation_dtype(x))
    m = xa.mean(-1, keepdim=True)
    centred = xa - m
    r = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)
    y = centred * r * w
    if b is not None:
        y = y + b
    return y.to(x.dtype), LayerNormSaved(x, m, r)


def layer_norm_backward(
    dy: Tensor,  # (..., C)
    saved: LayerNormSaved,
    w: Tensor,  # (C,)
    b: Tensor | None,  # (C,)
    dw: Tensor | None,  # (C,)  accumulated into
    db: Tensor | None,  # (C,)  accumulated into
) -> Tensor:  # dx (..., C)
    x, m, r = saved
    n = (x.to(r.dtype) - m) * r
    if dw is not None:
        add_row_sum(dw, dy * n)
    if db is not None:
        add_row_sum(db, dy)
    dn = dy.to(r.dtype) * w
    return (r * (dn - dn.mean(-1, keepdim=True) - n * (dn * n).mean(-1, keepdim=True))).to(x.dtype)


LAYER_NORM = Op(layer_norm_forward, layer_norm_backward)
