"""dropout: the contract, the share it keeps, and masks that depend on the sample and nothing else."""

import math

import pytest
import torch

from contract import check_op, each_case
from tapeless.ops.dropout import dropout_backward, dropout_forward, dropout_key
from tapeless.verify.cases import OpCase

KEY = dropout_key(0, 0, "embed")


@each_case("dropout")
def test_contract(case: OpCase):
    check_op(case)


def mask(key: int, p: float = 0.5, first_sample: int = 0) -> torch.Tensor:
    y, _ = dropout_forward(torch.ones(8, 5, 7), p=p, key=key, first_sample=first_sample)
    return y != 0


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_keeps_the_share_one_minus_p_and_the_mean(p: float):
    n = 100_000
    y, _ = dropout_forward(torch.ones(10, n // 10, dtype=torch.float64), p=p, key=KEY)
    share = (y != 0).double().mean().item()
    assert abs(share - (1 - p)) <= 5 * math.sqrt(p * (1 - p) / n)  # five standard deviations of a fair coin
    assert set(y.unique().tolist()) <= {0.0, 1 / (1 - p)}


def test_the_mask_of_a_sample_does_not_depend_on_the_micro_batch():
    x, dy = torch.randn(6, 5, 7), torch.randn(6, 5, 7)
    whole, _ = dropout_forward(x, p=0.5, key=KEY)
    dwhole = dropout_backward(dy, None, p=0.5, key=KEY)
    for size in (1, 2, 4):
        for first in range(0, 6, size):
            part = slice(first, first + size)
            y, _ = dropout_forward(x[part], p=0.5, key=KEY, first_sample=first)
            assert torch.equal(y, whole[part])
            assert torch.equal(dropout_backward(dy[part], None, p=0.5, key=KEY, first_sample=first), dwhole[part])


def test_masks_differ_between_samples_steps_purposes_and_seeds():
    masks = [mask(dropout_key(*name)) for name in ((0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b"))]
    masks.append(mask(dropout_key(0, 0, "a"), first_sample=8))
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert 0.3 < (a == b).double().mean().item() < 0.7  # unrelated masks agree on half of the elements


def test_elements_beyond_32_bits_are_counted():
    """A sample far into a long run: its index times its size no longer fits 32 bits, and must not wrap around."""
    far = 2**32 // 35 * 35 + 2**32
    assert not torch.equal(mask(KEY, first_sample=far), mask(KEY, first_sample=far % 2**32))
