"""Linear map, bias optional.                            letters: docs/notation.md

    y = x w' + b          y (N, O) = x (N, I) @ w' (I, O)
Backward, by y_no = sum_i x_ni w_oi + b_o:
    dx = dy w             (N, I) = (N, O) @ (O, I)
    dw += dy' x           (O, I) = (O, N) @ (N, I)
    db += sum_rows(dy)
Saved: x.
Tested by: tests/ops/test_linear.py."""

from functools import partial
from typing import NamedTuple

from torch import Tensor

from tapeless.ops.numerics import accumulate_matmul, add_row_sum, rows
from tapeless.ops.op import Op


class LinearSaved(NamedTuple):
    x: Tensor  # (..., I)


def linear_forward(
    x: Tensor,  # (..., I)
    w: Tensor,  # (O, I)
    b: Tensor | None,  # (O,)
) -> tuple[Tensor, LinearSaved]:  # y (..., O)
    y = x @ w.t()
    if b is not None:
        y += b
    return y, LinearSaved(x)


def linear_backward(
    dy: Tensor,  # (..., O)
    saved: LinearSaved,
    w: Tensor,  # (O, I)
    b: Tensor | None,  # (O,)
    dw: Tensor | None,  # (O, I)  accumulated into
    db: Tensor | None,  # (O,)  accumulated into
    *,
    want_dx: bool = True,
) -> Tensor | None:  # dx (..., I)
    if dw is not None:
        accumulate_matmul(dw, rows(dy).t(), rows(saved.x))
    if db is not None:
        add_row_sum(db, dy)
    return dy @ w if want_dx else None


LINEAR = Op(linear_forward, linear_backward, backward_dw=partial(linear_backward, want_dx=False))
