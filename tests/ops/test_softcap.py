"""softcap: the contract, the cap itself, and logits beyond any bound."""

import torch

from contract import check_op, each_case
from tapeless.ops.softcap import softcap_backward, softcap_forward
from tapeless.verify.cases import OpCase


@each_case("softcap")
def test_contract(case: OpCase):
    check_op(case)


def test_no_value_exceeds_the_cap():
    y, saved = softcap_forward(torch.tensor([-1e30, -50.0, 0.0, 50.0, 1e30]), cap=30.0)
    assert (y.abs() <= 30.0).all()
    assert y[[0, 2, 4]].tolist() == [-30.0, 0.0, 30.0]
    dx = softcap_backward(torch.ones(5), saved, cap=30.0)
    assert dx[[0, 2, 4]].tolist() == [0.0, 1.0, 0.0]
