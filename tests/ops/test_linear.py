"""linear: the contract, one map worked out by hand, and bfloat16 matmuls into a float32 gradient."""

import torch

from contract import check_op, each_case
from tapeless.ops.linear import linear_backward, linear_forward
from tapeless.verify.cases import OpCase


@each_case("linear")
def test_contract(case: OpCase):
    check_op(case)


def test_by_hand():
    x, w, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]), torch.tensor([0.5, 0.25, -1.0])
    y, saved = linear_forward(x, w, b)
    assert y.tolist() == [[11.5, 17.25, 22.0]]
    dw, db = torch.zeros_like(w), torch.zeros_like(b)
    dx = linear_backward(torch.tensor([[1.0, 0.0, -2.0]]), saved, w, b, dw, db)
    assert dx.tolist() == [[3 - 14, 4 - 16]]
    assert dw.tolist() == [[1, 2], [0, 0], [-2, -4]]
    assert db.tolist() == [1, 0, -2]


def test_float32_gradient_keeps_what_bfloat16_would_lose():
    """Steps of 2^-9 added to 1: each is below half an ulp of bfloat16 and would vanish there."""
    x = torch.full((1, 1), 2.0**-9, dtype=torch.bfloat16)
    w, dy = torch.ones(1, 1, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16)
    dw = torch.ones(1, 1)
    _, saved = linear_forward(x, w, None)
    for _ in range(8):
        linear_backward(dy, saved, w, None, dw, None)
    assert dw.item() == 1 + 8 * 2.0**-9
