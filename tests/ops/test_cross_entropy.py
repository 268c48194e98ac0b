"""cross_entropy: the contract, ignored rows, extreme logits, and the identities of its gradient."""

import math

import pytest
import torch

from contract import check_op, each_case
from tapeless.ops.cross_entropy import IGNORED, cross_entropy_backward, cross_entropy_forward, valid_targets
from tapeless.verify.cases import OpCase
from tapeless.verify.finding import distance
from tapeless.verify.tolerances import METAMORPHIC

OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.02, "softcap": 5.0}


@each_case("cross_entropy")
def test_contract(case: OpCase):
    check_op(case)


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
def test_all_targets_ignored_is_no_loss_and_no_gradient(options: dict[str, float]):
    loss, saved = cross_entropy_forward(torch.randn(3, 5), torch.full((3,), IGNORED), **options)
    assert loss.item() == 0.0
    assert torch.equal(cross_entropy_backward(1.0, saved, **options), torch.zeros(3, 5))


def test_ignored_rows_count_for_nothing_even_when_not_finite():
    logits = torch.randn(4, 5, dtype=torch.float64)
    targets = torch.tensor([1, IGNORED, 3, 0])
    loss, _ = cross_entropy_forward(logits[targets >= 0], targets[targets >= 0])
    logits[1] = torch.nan
    with_ignored, saved = cross_entropy_forward(logits, targets)
    assert distance(with_ignored, loss).largest <= METAMORPHIC["float64"]
    dlogits = cross_entropy_backward(1.0, saved)
    assert torch.equal(dlogits[1], torch.zeros(5, dtype=torch.float64))
    assert dlogits.isfinite().all()


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=["plain", "smoothing"])
def test_gradient_sums_to_zero_over_the_vocabulary(options: dict[str, float]):
    logits, targets = torch.randn(3, 5, dtype=torch.float64), torch.tensor([0, 4, 2])
    dlogits = cross_entropy_backward(1.0, cross_entropy_forward(logits, targets, **options)[1], **options)
    assert dlogits.sum(-1).abs().max() <= METAMORPHIC["float64"] * dlogits.abs().max()


def test_uniform_logits_cost_the_log_of_the_vocabulary():
    loss, _ = cross_entropy_forward(torch.zeros(3, 7, dtype=torch.float64), torch.tensor([0, 3, 6]))
    assert math.isclose(loss.item(), math.log(7), rel_tol=METAMORPHIC["float64"])


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
def test_logits_of_ten_thousand_do_not_overflow(options: dict[str, float]):
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 1e4]])
    loss, saved = cross_entropy_forward(logits, torch.tensor([1, 0]), **options)
    assert loss.isfinite()
    assert cross_entropy_backward(1.0, saved, **options).isfinite().all()


def test_the_loss_of_a_hopeless_row_is_the_gap_of_its_logits():
    """A clamped logarithm would stop at about 1e2, and its gradient at 0."""
    loss, saved = cross_entropy_forward(torch.tensor([[1e4, -1e4, 0.0]]), torch.tensor([1]))
    assert loss.item() == 2e4
    assert cross_entropy_backward(1.0, saved).tolist() == [[1.0, -1.0, 0.0]]


def test_unequal_micro_batches_add_up_to_the_whole():
    logits, targets = torch.randn(5, 7, dtype=torch.float64), torch.tensor([0, IGNORED, 3, 6, 6])
    count = valid_targets(targets)
    whole, saved = cross_entropy_forward(logits, targets)
    parts = [cross_entropy_forward(x, t, num_targets=count) for x, t in zip(logits.split(3), targets.split(3), strict=True)]
    assert count == 4
    assert distance(parts[0][0] + parts[1][0], whole).largest <= METAMORPHIC["float64"]
    dlogits = torch.cat([cross_entropy_backward(1.0, part, num_targets=count) for _, part in parts])
    assert distance(dlogits, cross_entropy_backward(1.0, saved)).largest <= METAMORPHIC["float64"]
