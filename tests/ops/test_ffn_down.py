"""The gate and the linear map after it: the contract, and one layer worked out by hand."""

import torch

from contract import check_op, each_case
from tapeless.config import ModelConfig
from tapeless.ops.ffn_down import FFN_DOWN
from tapeless.verify.cases import OpCase


@each_case("ffn_down")
def test_contract(case: OpCase):
    check_op(case)


def test_every_configured_kind_has_its_op():
    assert set(FFN_DOWN) == set(ModelConfig.__dataclass_fields__["ffn"].metadata["choices"])


def test_by_hand():
    """relu of (2, -1) is (2, 0), and only its first unit is open."""
    x, w, b = torch.tensor([[2.0, -1.0]]), torch.tensor([[3.0, 5.0]]), torch.tensor([0.5])
    y, saved = FFN_DOWN["relu"].forward(x, w, b)
    assert y.tolist() == [[6.5]]
    dw, db = torch.zeros_like(w), torch.zeros_like(b)
    dx = FFN_DOWN["relu"].backward(torch.tensor([[10.0]]), saved, w, b, dw, db)
    assert dx.tolist() == [[30.0, 0.0]]
    assert dw.tolist() == [[20.0, 0.0]]
    assert db.tolist() == [10.0]
