"""Addition and multiplication with broadcasting.

    y = a + b             da = sum_to_a(dy)         db = sum_to_b(dy)
    y = a b               da = sum_to_a(dy b)       db = sum_to_b(dy a)
Broadcasting repeats an operand along an axis; its adjoint, sum_to, sums the gradients of the repeats.
Saved: for a + b the two shapes; for a b both operands.
Tested by: tests/ops/test_broadcast.py."""

from typing import NamedTuple

import torch
from torch import Tensor

from tapeless.ops.numerics import sum_to
from tapeless.ops.op import Op


class AddSaved(NamedTuple):
    a_shape: torch.Size
    b_shape: torch.Size


class MulSaved(NamedTuple):
    a: Tensor  # any shapes that broadcast
    b: Tensor


def add_forward(
    a: Tensor,  # any shapes that broadcast
    b: Tensor,
) -> tuple[Tensor, AddSaved]:
    return a + b, AddSaved(a.shape, b.shape)


def add_backward(
    dy: Tensor,  # the broadcast shape
    saved: AddSaved,
) -> tuple[Tensor, Tensor]:  # da, db
    return sum_to(dy, saved.a_shape), sum_to(dy, saved.b_shape)


def mul_forward(
    a: Tensor,  # any shapes that broadcast
    b: Tensor,
) -> tuple[Tensor, MulSaved]:
    return a * b, MulSaved(a, b)


def mul_backward(
    dy: Tensor,  # the broadcast shape
    saved: MulSaved,
) -> tuple[Tensor, Tensor]:  # da, db
    a, b = saved
    return sum_to(dy * b, a.shape), sum_to(dy * a, b.shape)


ADD = Op(add_forward, add_backward, grads=("da", "db"))
MUL = Op(mul_forward, mul_backward, grads=("da", "db"))
