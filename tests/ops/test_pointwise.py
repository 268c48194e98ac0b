"""The activations: the contract, the point zero, both infinities, and derivatives that stay finite in the tails."""

import pytest
import torch

from contract import check_op, each_case
from tapeless.ops.op import Op
from tapeless.ops.pointwise import GELU, RELU, RELU2, SIGMOID, SILU, TANH
from tapeless.verify.cases import OpCase

ALL = {"sigmoid": SIGMOID, "silu": SILU, "tanh": TANH, "gelu": GELU, "relu": RELU, "relu2": RELU2}


@each_case("pointwise")
def test_contract(case: OpCase):
    check_op(case)


@pytest.mark.parametrize(
    ("op", "value", "slope"),
    [(SIGMOID, 0.5, 0.25), (SILU, 0.0, 0.5), (TANH, 0.0, 1.0), (GELU, 0.0, 0.5), (RELU, 0.0, 0.0), (RELU2, 0.0, 0.0)],
    ids=ALL,
)
def test_at_zero(op: Op, value: float, slope: float):
    y, saved = op.forward(torch.zeros(1))
    assert y.item() == value
    assert op.backward(torch.ones(1), saved).item() == slope


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_tails_are_finite(name: str, dtype: torch.dtype):
    y, saved = ALL[name].forward(torch.tensor([-1e4, -90.0, 90.0, 1e4], dtype=dtype))
    dx = ALL[name].backward(torch.ones(4, dtype=dtype), saved)
    assert y.dtype == dx.dtype == dtype
    assert y.isfinite().all()
    assert dx.isfinite().all()


@pytest.mark.parametrize("name", ["relu", "relu2"])
def test_relu_does_not_hide_a_nan(name: str):
    y, saved = ALL[name].forward(torch.tensor([torch.nan, -1.0]))
    assert y.isnan().tolist() == [True, False]
    assert ALL[name].backward(torch.tensor([1.0, torch.nan]), saved).isnan()[1]
