"""rms_norm: the contract, a row of zeros, scale invariance, and statistics in float32."""

import torch

from contract import check_op, each_case
from tapeless.ops.rms_norm import rms_norm_backward, rms_norm_forward
from tapeless.verify.cases import OpCase
from tapeless.verify.tolerances import METAMORPHIC


@each_case("rms_norm")
def test_contract(case: OpCase):
    check_op(case)


def test_a_row_of_zeros_is_finite():
    w = torch.randn(5)
    y, saved = rms_norm_forward(torch.zeros(2, 5), w, eps=1e-6)
    assert torch.equal(y, torch.zeros(2, 5))
    assert rms_norm_backward(torch.randn(2, 5), saved, w, None).isfinite().all()


def test_gradient_is_orthogonal_to_the_input_without_eps():
    """Scaling a row changes nothing, so the gradient is orthogonal to it."""
    x, dy, w = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 7), (3, 7), (7,)))
    _, saved = rms_norm_forward(x, w, eps=0.0)
    dx = rms_norm_backward(dy, saved, w, None)
    assert ((x * dx).sum(-1).abs() <= METAMORPHIC["float64"] * x.norm(dim=-1) * dx.norm(dim=-1)).all()


def test_bfloat16_rows_beyond_the_range_of_half_precision():
    """Squares of 1e4 and sums over the row are held in float32."""
    x = torch.full((1, 4096), 1e4, dtype=torch.bfloat16)
    y, saved = rms_norm_forward(x, torch.ones(4096, dtype=torch.bfloat16), eps=1e-6)
    assert saved.r.dtype == torch.float32
    assert torch.equal(y, torch.ones_like(y))
