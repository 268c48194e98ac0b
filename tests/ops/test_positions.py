"""positions: the contract, and the end of the table."""

import pytest
import torch

from contract import check_op, each_case
from tapeless.errors import InputError
from tapeless.ops.positions import positions_backward, positions_forward
from tapeless.verify.cases import OpCase


@each_case("positions")
def test_contract(case: OpCase):
    check_op(case)


@pytest.mark.parametrize("offset", [0, 2])
def test_sequence_longer_than_the_table_is_an_error(offset: int):
    w = torch.randn(4 + offset, 3)
    positions_forward(torch.randn(2, 4, 3), w, offset=offset)
    with pytest.raises(InputError, match=f"sequence of {5 + offset} tokens"):
        positions_forward(torch.randn(2, 5, 3), w, offset=offset)


def test_offset_equals_the_tail_of_a_longer_sequence():
    x, w = torch.randn(2, 6, 3), torch.randn(6, 3)
    whole, _ = positions_forward(x, w)
    tail, _ = positions_forward(x[:, 4:], w, offset=4)
    assert torch.equal(tail, whole[:, 4:])


def test_positions_not_visited_have_no_gradient():
    w = torch.randn(6, 3)
    dw = torch.zeros_like(w)
    positions_backward(torch.randn(2, 2, 3), None, w, dw, offset=3)
    assert torch.equal(dw[[0, 1, 2, 5]], torch.zeros(4, 3))
    assert (dw[3:5] != 0).all()
