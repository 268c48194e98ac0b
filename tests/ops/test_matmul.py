"""matmul: the contract, and batch axes that only one operand has."""

import pytest
import torch

from contract import check_op, each_case
from tapeless.ops.matmul import matmul_backward, matmul_forward
from tapeless.verify.cases import OpCase


@each_case("matmul")
def test_contract(case: OpCase):
    check_op(case)


@pytest.mark.parametrize(
    ("a", "b"),
    [((3, 5), (5, 2)), ((4, 3, 5), (5, 2)), ((3, 5), (4, 5, 2)), ((4, 1, 3, 5), (6, 5, 2)), ((1, 3, 5), (1, 5, 2))],
)
def test_gradients_have_the_shapes_of_the_operands(a: tuple[int, ...], b: tuple[int, ...]):
    y, saved = matmul_forward(torch.randn(a), torch.randn(b))
    da, db = matmul_backward(torch.randn(y.shape), saved)
    assert (da.shape, db.shape) == (a, b)
