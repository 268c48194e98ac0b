"""The feed-forward gates: the contract, and which half is which."""

import torch

from contract import check_op, each_case
from tapeless.config import ModelConfig
from tapeless.ops.ffn_gate import FFN_GATES, GATED, SWIGLU
from tapeless.verify.cases import OpCase


@each_case("ffn_gate")
def test_contract(case: OpCase):
    check_op(case)


def test_every_configured_kind_has_its_op():
    assert set(FFN_GATES) == set(ModelConfig.__dataclass_fields__["ffn"].metadata["choices"])
    assert set(FFN_GATES) > GATED


def test_the_first_half_is_the_gate():
    gate_up = torch.tensor([[0.0, 3.0]])  # a closed gate lets nothing of `up` through, whatever it is
    h, saved = SWIGLU.forward(gate_up)
    assert h.tolist() == [[0.0]]
    assert SWIGLU.backward(torch.ones(1, 1), saved).tolist() == [[1.5, 0.0]]
