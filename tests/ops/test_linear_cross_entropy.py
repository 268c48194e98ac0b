"""linear_cross_entropy: the contract, and that blocks of rows change nothing."""

import pytest
import torch

from contract import check_op, each_case
from tapeless.ops.cross_entropy import IGNORED, cross_entropy_forward
from tapeless.ops.linear_cross_entropy import CHUNK, LINEAR_CROSS_ENTROPY, chunk_rows
from tapeless.verify.cases import OpCase
from tapeless.verify.finding import distance
from tapeless.verify.tolerances import METAMORPHIC

N, C, V = 7, 3, 5


@each_case("linear_cross_entropy")
def test_contract(case: OpCase):
    check_op(case)


def test_block_is_bounded_by_its_logits_and_never_empty():
    assert chunk_rows(1024, CHUNK) * 1024 == CHUNK
    assert chunk_rows(2 * CHUNK, CHUNK) == 1


@pytest.mark.parametrize("rows", [1, 3, 7, 100])
def test_blocks_of_rows_equal_the_whole(rows: int):
    x, w = torch.randn(N, C, dtype=torch.float64), torch.randn(V, C, dtype=torch.float64)
    targets = torch.tensor([0, 1, IGNORED, 4, 4, 2, 0])
    loss, saved = LINEAR_CROSS_ENTROPY.forward(x, targets, w, chunk=rows * V)
    whole, _ = cross_entropy_forward(x @ w.t(), targets)
    assert distance(loss, whole).largest <= METAMORPHIC["float64"]
    assert saved.lse.shape == (N, 1)


def test_all_targets_ignored_is_no_loss_and_no_gradient():
    x, w, targets = torch.randn(2, N, C), torch.randn(V, C), torch.full((2, N), IGNORED)
    dw = torch.zeros_like(w)
    loss, saved = LINEAR_CROSS_ENTROPY.forward(x, targets, w)
    dx = LINEAR_CROSS_ENTROPY.backward(1.0, saved, w, dw)
    assert loss.item() == 0.0
    assert torch.equal(dx, torch.zeros_like(x))
    assert torch.equal(dw, torch.zeros_like(w))


def test_logits_of_ten_thousand_do_not_overflow():
    x, w = torch.tensor([[100.0], [-100.0]]), torch.tensor([[100.0], [-100.0], [0.0]])
    loss, saved = LINEAR_CROSS_ENTROPY.forward(x, torch.tensor([1, 1]), w)
    assert loss.item() == 1e4
    assert LINEAR_CROSS_ENTROPY.backward(1.0, saved, w, None).isfinite().all()
