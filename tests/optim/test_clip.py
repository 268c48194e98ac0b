"""Clipping by the global norm."""

import math

import pytest
import torch

from tapeless.optim.clip import CHUNK, clip_grads, grad_norm


@pytest.mark.parametrize("size", [1, 2, 1000, CHUNK, CHUNK + 1, 3 * CHUNK - 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_is_that_of_all_elements(size: int, dtype: torch.dtype):
    g = torch.randn(size, dtype=dtype)
    truth = math.sqrt(math.fsum(x * x for x in g.tolist()))
    assert float(grad_norm(g)) == pytest.approx(truth, rel=10 * torch.finfo(dtype).eps * math.log2(size + 1))


def test_millions_of_elements_are_summed_without_loss():
    """One float32 sum over as many squares is off by more than 1e-4."""
    g = torch.randn(10_000_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    assert float(grad_norm(g)) == pytest.approx(float(g.double().norm()), rel=1e-6)


def test_scaled_to_the_limit_and_the_norm_before_returned():
    g = torch.tensor([3.0, -4.0], dtype=torch.float64)
    assert clip_grads(g, 1.0) == 5.0
    assert g.tolist() == pytest.approx([0.6, -0.8], rel=1e-15)


def test_a_large_gradient_keeps_its_direction():
    g = torch.randn(500, dtype=torch.float64)
    before = g.clone()
    norm = clip_grads(g, 2.5)
    assert norm == pytest.approx(float(before.norm()), rel=1e-14)
    assert float(g.norm()) == pytest.approx(2.5, rel=1e-14)
    assert g.allclose(before * (2.5 / norm), rtol=1e-15, atol=0)


@pytest.mark.parametrize("limit", [0.0, 5.0, 100.0])
def test_within_the_limit_or_without_one_nothing_changes(limit: float):
    g = torch.tensor([3.0, -4.0])
    assert clip_grads(g, limit) == 5.0
    assert g.tolist() == [3.0, -4.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_not_finite_leaves_the_gradients(bad: float):
    g = torch.tensor([3.0, bad, -4.0])
    before = g.clone()
    assert not math.isfinite(clip_grads(g, 1.0))
    assert torch.equal(g.nan_to_num(nan=7.0), before.nan_to_num(nan=7.0))


def test_a_norm_beyond_the_range_counts_as_not_finite():
    g = torch.full((4,), 3e38)
    assert clip_grads(g, 1.0) == math.inf
    assert g.tolist() == torch.full((4,), 3e38).tolist()


def test_no_gradient_at_all():
    g = torch.zeros(3)
    assert clip_grads(g, 1.0) == 0.0
    assert not g.any()
