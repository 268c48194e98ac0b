"""Rows in vectors against numpy: any length, any number visible, NaN."""

import numba
import numpy as np
import pytest

pytest.importorskip("numba")

from tapeless.kernels.cpu.rows import largest, softmax_row, softmax_row_backward
from tapeless.kernels.cpu.tile import WIDTH


@numba.njit
def find_largest(x):
    return largest(x)


@numba.njit
def forward(z, at, n, visible, scale):
    return softmax_row(z, at, n, visible, scale)


@numba.njit
def backward(p, dp, at, n, visible, scale, lse):
    softmax_row_backward(p, dp, at, n, visible, scale, lse)


@pytest.mark.parametrize("n", [1, 2, WIDTH - 1, WIDTH, WIDTH + 1, 3 * WIDTH - 1, 1000])
def test_largest(n: int):
    rng = np.random.default_rng(n)
    for place in {0, n // 2, n - 1}:
        x = -rng.random(n, np.float32) - 1
        x[place] = -0.5
        assert find_largest(x) == np.float32(-0.5)
        assert find_largest((x.view(np.uint32) >> 16).astype(np.uint16)) == np.float32(-0.5)


@pytest.mark.parametrize("visible", [1, 2, WIDTH - 1, WIDTH, WIDTH + 1, 2 * WIDTH, 3 * WIDTH - 1, 3 * WIDTH])
def test_softmax_row(visible: int):
    rng, n, at = np.random.default_rng(visible), 3 * WIDTH, 7
    z = rng.standard_normal(n + 2 * at, np.float32) * 5
    z[at + visible :] = 1e30  # what is hidden must not matter, however large
    before = z.copy()
    total, top = forward(z, at, n, visible, np.float32(0.5))
    seen = before[at : at + visible].astype(np.float64) / 2
    assert top == np.float32(seen.max())
    np.testing.assert_allclose(z[at : at + visible], np.exp(seen - seen.max()), rtol=1e-6, atol=1e-30)
    np.testing.assert_allclose(total, np.exp(seen - seen.max()).sum(), rtol=1e-6)
    assert (z[at + visible : at + n] == 0).all()
    np.testing.assert_array_equal(z[:at], before[:at])
    np.testing.assert_array_equal(z[at + n :], before[at + n :])


@pytest.mark.parametrize("visible", [0, 1, WIDTH, WIDTH + 5, 2 * WIDTH])
def test_softmax_row_backward(visible: int):
    rng, n, at = np.random.default_rng(visible), 2 * WIDTH, 3
    z, dp = rng.standard_normal((2, n + 2 * at), np.float32)
    dp[at + visible :] = np.nan  # nor may what is hidden leak
    seen, upstream = z[at : at + visible].astype(np.float64) / 2, dp[at : at + visible].astype(np.float64)
    p = np.exp(seen) / np.exp(seen).sum()
    lse = np.float32(np.log(np.exp(seen).sum())) if visible else np.float32(0)
    backward(z, dp, at, n, visible, np.float32(0.5), lse)
    np.testing.assert_allclose(z[at : at + visible], p, rtol=1e-6)
    np.testing.assert_allclose(dp[at : at + visible], p * (upstream - (p * upstream).sum()), rtol=1e-4, atol=1e-7)
    assert (z[at + visible : at + n] == 0).all()
    assert (dp[at + visible : at + n] == 0).all()


def test_nan_stays():
    z = np.zeros(WIDTH, np.float32)
    z[3] = np.nan
    assert np.isnan(forward(z.copy(), 0, WIDTH, WIDTH, np.float32(1))[0])
    assert not np.isnan(forward(z.copy(), 0, WIDTH, 3, np.float32(1))[0])
