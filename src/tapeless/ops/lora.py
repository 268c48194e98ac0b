"""The term that an adapter of low rank adds to a product whose own matrix stays as it is (LoRA).

    y = x w' + s (x a') b'      the first term is the product's; this op is the second, with s = alpha / r
    u = s x a'   (N, r)         y = u b'   (N, O)
Backward, by y_no = sum_k u_nk b_ok and u_nk = s sum_i x_ni a_ki:
    db += dy' u                 (O, r) = (O, N) @ (N, r)
    du = s dy b                 (N, r) = (N, O) @ (O, r)
    da += du' x                 dx = du a
The sum of both terms hands dy to each, so that x receives dy w + du a: the gradient goes through w, and w itself needs none.
s is multiplied in where it is cheapest, at the r columns in the middle.
x -> x a' is itself a product of the model's set (`product`), the one that stands beside it: a linear map, or the ffn_down that
makes h on the way, so that neither pass keeps h.
Saved: what that product saves, and u.
Tested by: tests/ops/test_lora.py."""

from typing import Any, NamedTuple

from torch import Tensor

from tapeless.ops.linear import LINEAR
from tapeless.ops.numerics import accumulate_matmul, rows
from tapeless.ops.op import Op


class LoraSaved(NamedTuple):
    linear: Any  # its own record, which holds x (..., I)
    u: Tensor  # (..., r)


def lora_forward(
    x: Tensor,  # (..., I)
    a: Tensor,  # (r, I)
    b: Tensor,  # (O, r)
    *,
    scale: float,
    linear: Op = LINEAR,
) -> tuple[Tensor, LoraSaved]:  # y (..., O)
    xa, linear_saved = linear.forward(x, a, None)
    u = xa * scale
    return u @ b.t(), LoraSaved(linear_saved, u)


def lora_backward(
    dy: Tensor,  # (..., O)
    saved: LoraSaved,
    a: Tensor,  # (r, I)
    b: Tensor,  # (O, r)
    da: Tensor | None,  # (r, I)  accumulated into, or overwritten where the product's set does so
    db: Tensor | None,  # (O, r)  accumulated into
    *,
    scale: float,
    linear: Op = LINEAR,
) -> Tensor:  # dx (..., I)
    if db is not None:
        accumulate_matmul(db, rows(dy).t(), rows(saved.u))
    du = (dy @ b) * scale
    return linear.backward(du, saved.linear, a, None, da, None)


LORA = Op(lora_forward, lora_backward)
