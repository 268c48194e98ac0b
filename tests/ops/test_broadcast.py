"""add and mul: the contract, and shapes that repeat an operand along new, unit and no axes."""

import pytest
import torch

from contract import check_op, each_case
from tapeless.ops.broadcast import ADD, MUL
from tapeless.ops.op import Op
from tapeless.verify.cases import OpCase


@each_case("broadcast")
def test_contract(case: OpCase):
    check_op(case)


@pytest.mark.parametrize("op", [ADD, MUL], ids=["add", "mul"])
@pytest.mark.parametrize(("a", "b"), [((2, 3), (2, 3)), ((2, 3), (3,)), ((2, 3), ()), ((1, 3), (2, 1)), ((4, 1, 3), (1, 2, 1))])
def test_gradients_have_the_shapes_of_the_operands(op: Op, a: tuple[int, ...], b: tuple[int, ...]):
    y, saved = op.forward(torch.randn(a), torch.randn(b))
    da, db = op.backward(torch.randn(y.shape), saved)
    assert (da.shape, db.shape) == (a, b)


def test_a_scalar_collects_from_everywhere():
    a, b = torch.arange(6.0).view(2, 3), torch.tensor(2.0)
    _, saved = MUL.forward(a, b)
    da, db = MUL.backward(torch.ones(2, 3), saved)
    assert torch.equal(da, torch.full((2, 3), 2.0))
    assert db.item() == 15.0
