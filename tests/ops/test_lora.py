"""lora: the contract, as adapter of a linear map and of ffn_down, and one term worked out by hand."""

import torch

from contract import check_op, each_case
from tapeless.ops.lora import lora_backward, lora_forward
from tapeless.verify.cases import OpCase


@each_case("lora")
def test_contract(case: OpCase):
    check_op(case)


def test_by_hand():
    x, a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), torch.tensor([[5.0], [6.0], [-1.0]])
    y, saved = lora_forward(x, a, b, scale=2.0)
    assert y.tolist() == [[110.0, 132.0, -22.0]]
    da, db = torch.zeros_like(a), torch.zeros_like(b)
    dx = lora_backward(torch.tensor([[1.0, 0.0, -2.0]]), saved, a, b, da, db, scale=2.0)
    assert db.tolist() == [[22.0], [0.0], [-44.0]]
    assert da.tolist() == [[14.0, 28.0]]
    assert dx.tolist() == [[42.0, 56.0]]


def test_an_adapter_of_zeros_adds_nothing_and_still_learns():
    """As every adapter begins: b is zero, so that a has no gradient yet, but b has."""
    x, a, b = torch.ones(2, 3), torch.ones(1, 3), torch.zeros(4, 1)
    y, saved = lora_forward(x, a, b, scale=0.5)
    da, db = torch.zeros_like(a), torch.zeros_like(b)
    dx = lora_backward(torch.ones(2, 4), saved, a, b, da, db, scale=0.5)
    assert not y.any()
    assert not da.any()
    assert not dx.any()
    assert db.tolist() == [[3.0]] * 4
