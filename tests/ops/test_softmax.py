"""softmax and log-softmax: the contract, extreme rows, and the identities of their gradients."""

import pytest
import torch

from contract import check_op, each_case
from tapeless.ops.softmax import (
    LOG_SOFTMAX,
    SOFTMAX,
    log_softmax_backward,
    log_softmax_forward,
    softmax_backward,
    softmax_forward,
)
from tapeless.verify.cases import OpCase
from tapeless.verify.tolerances import METAMORPHIC


@each_case("softmax")
def test_contract(case: OpCase):
    check_op(case)


@pytest.mark.parametrize("op", [SOFTMAX, LOG_SOFTMAX], ids=["softmax", "log_softmax"])
def test_logits_of_ten_thousand_do_not_overflow(op):
    x = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [1e4, 1e4, 1e4]])
    y, saved = op.forward(x)
    assert y.isfinite().all()
    assert op.backward(torch.randn(3, 3), saved).isfinite().all()
    assert torch.equal(softmax_forward(x)[0][0], torch.tensor([1.0, 0.0, 0.0]))


def test_masked_entries_are_exactly_zero_in_both_passes():
    x = torch.tensor([[1.0, -torch.inf, 2.0, -torch.inf]])
    y, saved = softmax_forward(x)
    dx = softmax_backward(torch.randn(1, 4), saved)
    assert torch.equal(y[0, [1, 3]], torch.zeros(2))
    assert torch.equal(dx[0, [1, 3]], torch.zeros(2))
    assert dx.isfinite().all()


def test_a_row_of_minus_infinity_is_nan_as_in_torch():
    """0/0: a row that may look at nothing has no shares, and saying so beats inventing some. Its neighbours are untouched."""
    x = torch.tensor([[-torch.inf, -torch.inf], [0.0, 0.0]])
    y, _ = softmax_forward(x)
    assert torch.equal(y.isnan(), torch.softmax(x, -1).isnan())
    assert y[1].tolist() == [0.5, 0.5]


def test_gradients_sum_to_zero_along_a_row():
    """Adding a constant to a row changes no share."""
    x, dy = (torch.randn(5, 7, dtype=torch.float64) for _ in range(2))
    for forward, backward in ((softmax_forward, softmax_backward), (log_softmax_forward, log_softmax_backward)):
        dx = backward(dy, forward(x)[1])
        assert dx.sum(-1).abs().max() <= METAMORPHIC["float64"] * dx.abs().max()
