"""add_norm: the contract, and that it is bit for bit the sum and the norm one after the other."""

import pytest
import torch

from contract import check_op, each_case
from tapeless.ops.add_norm import ADD_LAYER_NORM, ADD_RMS_NORM
from tapeless.ops.layer_norm import LAYER_NORM
from tapeless.ops.op import Op
from tapeless.ops.rms_norm import RMS_NORM
from tapeless.verify.cases import OpCase


@each_case("add_norm")
def test_contract(case: OpCase):
    check_op(case)


@pytest.mark.parametrize(("fused", "norm"), [(ADD_RMS_NORM, RMS_NORM), (ADD_LAYER_NORM, LAYER_NORM)], ids=["rms", "layer"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equals_the_norm_of_the_sum_bit_for_bit(fused: Op, norm: Op, dtype: torch.dtype):
    x, delta, *params = (torch.randn(*shape).to(dtype) for shape in ((2, 3, 5), (2, 3, 5), (5,), (5,)))
    if norm is RMS_NORM:
        params.pop()
    s, n, _ = fused.forward(x, delta, *params, eps=1e-5)
    assert torch.equal(s, x + delta)
    assert torch.equal(n, norm.forward(s, *params, eps=1e-5)[0])


def test_without_delta_the_sum_is_the_input_itself():
    x = torch.randn(2, 3, 5)
    s, _, saved = ADD_RMS_NORM.forward(x, None, torch.randn(5), eps=1e-5)
    assert s is x
    assert saved.norm.x is x
