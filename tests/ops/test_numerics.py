"""The shared conventions: what is accumulated where, the shifted log-sum-exp, the adjoint of broadcasting."""

import math

import pytest
import torch

from tapeless.ops.numerics import accumulate_matmul, accumulation_dtype, add_row_sum, logsumexp, real_part, rows, sum_to
from tapeless.verify.finding import distance
from tapeless.verify.tolerances import METAMORPHIC


@pytest.mark.parametrize(
    ("held", "summed"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.complex128, torch.complex128),
    ],
    ids=str,
)
def test_accumulation_dtype(held: torch.dtype, summed: torch.dtype):
    assert accumulation_dtype(torch.ones(1, dtype=held)) == summed


def test_logsumexp_of_extreme_rows():
    x = torch.tensor([[1e4, 0.0], [-1e4, -2e4], [-torch.inf, 0.0], [-torch.inf, -torch.inf]])
    assert logsumexp(x).flatten().tolist() == [1e4, -1e4, 0.0, -torch.inf]
    assert logsumexp(torch.tensor([[torch.nan, 0.0]])).isnan().all()


def test_logsumexp_looks_at_real_parts_alone():
    x = torch.randn(3, 5, dtype=torch.float64)
    lifted = logsumexp(torch.complex(x, torch.full_like(x, 1e-20)))
    assert distance(real_part(lifted), torch.logsumexp(x, -1, keepdim=True)).largest <= METAMORPHIC["float64"]
    assert torch.allclose(lifted.imag, torch.full_like(lifted.imag, 1e-20), rtol=METAMORPHIC["float64"], atol=0.0)


def test_row_sum_of_bfloat16_is_held_in_float32():
    """One and 4096 times 2^-9: in bfloat16 every step would be rounded away."""
    x = torch.full((4097, 1), 2.0**-9, dtype=torch.bfloat16)
    x[0] = 1.0
    dw = torch.zeros(1)
    add_row_sum(dw, x)
    assert dw.item() == 1 + 4096 * 2.0**-9


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_accumulate_matmul_adds(dtype: torch.dtype):
    dw = torch.ones(2, 3)
    accumulate_matmul(dw, torch.ones(2, 5, dtype=dtype), torch.ones(5, 3, dtype=dtype))
    assert torch.equal(dw, torch.full((2, 3), 6.0))


def test_rows_flattens_all_but_the_last_axis():
    assert rows(torch.zeros(2, 3, 5)).shape == (6, 5)
    assert rows(torch.zeros(5)).shape == (1, 5)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 1), (1, 5), (3, 5), (1, 1, 1), (2, 3, 5)])
def test_sum_to_counts_the_repeats(shape: tuple[int, ...]):
    out = sum_to(torch.ones(2, 3, 5), torch.Size(shape))
    assert out.shape == shape
    assert (out == 30 / math.prod(shape)).all()
