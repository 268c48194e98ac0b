"""layer_norm: the contract, a constant row, and the two identities of its gradient."""

import torch

from contract import check_op, each_case
from tapeless.ops.layer_norm import layer_norm_backward, layer_norm_forward
from tapeless.verify.cases import OpCase
from tapeless.verify.tolerances import METAMORPHIC


@each_case("layer_norm")
def test_contract(case: OpCase):
    check_op(case)


def test_a_constant_row_gives_the_bias():
    w, b = torch.randn(5), torch.randn(5)
    y, saved = layer_norm_forward(torch.full((2, 5), 3.0), w, b, eps=1e-5)
    assert torch.equal(y, b.expand(2, 5))
    assert layer_norm_backward(torch.randn(2, 5), saved, w, b, None, None).isfinite().all()


def test_gradient_sums_to_zero_and_is_orthogonal_to_the_input_without_eps():
    """Neither shifting nor scaling a row changes the result."""
    x, dy, w = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 7), (3, 7), (7,)))
    _, saved = layer_norm_forward(x, w, None, eps=0.0)
    dx = layer_norm_backward(dy, saved, w, None, None, None)
    for identity in (dx.sum(-1), (x * dx).sum(-1)):
        assert (identity.abs() <= METAMORPHIC["float64"] * x.norm(dim=-1) * dx.norm(dim=-1)).all()


def test_a_large_mean_does_not_cancel():
    """The variance is taken about the mean: E[x^2] - E[x]^2 would lose everything at 1e4 in float32."""
    x = (torch.randn(3, 64) + 1e4).float()
    y, _ = layer_norm_forward(x, torch.ones(64), None, eps=1e-5)
    expected, _ = layer_norm_forward(x.double(), torch.ones(64, dtype=torch.float64), None, eps=1e-5)
    ulp = 1e4 * torch.finfo(torch.float32).eps  # of the inputs
    assert (y - expected).abs().max() <= 4 * ulp  # all that a mean of 64 may be off by, and y with it
