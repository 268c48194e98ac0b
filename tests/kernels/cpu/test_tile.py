"""Matmuls of tiles against numpy, also transposed, accumulated, and inside larger buffers."""

import numba
import numpy as np
import pytest

pytest.importorskip("numba")

from tapeless.kernels.cpu.tile import ROWS, WIDTH, tile_matmul


@numba.njit(error_model="numpy")
def multiply(c, c0, c_row, a, a_row, a_col, b, b_row, M, N, K, add):
    tile_matmul(c, c0, c_row, a, 0, a_row, a_col, b, 0, b_row, M, N, K, add)


@pytest.mark.parametrize("M", [ROWS, 4 * ROWS])
@pytest.mark.parametrize("N", [WIDTH, 2 * WIDTH, 3 * WIDTH])
@pytest.mark.parametrize("K", [0, 1, 7, 64])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_matmul(M: int, N: int, K: int, transposed: bool, add: bool):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((M, K), np.float32), rng.standard_normal((K, N), np.float32)
    margin, row = 5, N + 3
    c = rng.standard_normal(margin + M * row + margin, np.float32)
    before = c.copy()
    inside = c[margin : margin + M * row].reshape(M, row)[:, :N]
    expected = a.astype(np.float64) @ b + (inside if add else 0)
    flat = np.ascontiguousarray(a.T if transposed else a).reshape(-1)
    strides = (1, M) if transposed else (K, 1)
    multiply(c, margin, row, flat, *strides, b.reshape(-1), N, M, N, K, add)
    np.testing.assert_allclose(inside, expected, rtol=1e-5, atol=1e-5)
    inside[:] = before[margin : margin + M * row].reshape(M, row)[:, :N]
    np.testing.assert_array_equal(c, before, "written outside of c")
