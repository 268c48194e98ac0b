"""Few rows times a weight matrix, and sums of values, against numpy: any shape, and the same bits whatever the other rows."""

from itertools import product

import numba
import numpy as np
import pytest

pytest.importorskip("numba")

from tapeless.kernels.cpu.dot_tile import rows_times, weighted_sum
from tapeless.kernels.cpu.tile import WIDTH


@numba.njit
def multiply(y, y0, y_row, w, w0, x, x0, x_row, R, O, I, near):
    rows_times(y, y0, y_row, w, w0, x, x0, x_row, R, O, I, near)


@numba.njit
def add_up(y, a, v, v0, v_row, S, count):
    weighted_sum(y, a, v, v0, v_row, S, count)


def weights(shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """As the kernels have them, and their values."""
    w = np.random.default_rng(1).standard_normal(shape, np.float32)
    if dtype == "float32":
        return w, w
    upper = (w.view(np.uint32) >> 16).astype(np.uint16)
    return upper, (upper.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize(("dtype", "x_dtype"), [("float32",) * 2, ("bfloat16", "float32"), ("bfloat16",) * 2])
@pytest.mark.parametrize("I", [1, WIDTH - 1, WIDTH, 2 * WIDTH, 4 * WIDTH + 3])
@pytest.mark.parametrize("O", [1, WIDTH - 1, WIDTH, WIDTH + 1, 3 * WIDTH])
def test_rows_times(I: int, O: int, dtype: str, x_dtype: str):
    """Other operands lie next to each, and are NaN: nothing of them may be read into a result."""
    margin, most, alone = 5, 17, None
    held, values = weights((O, I), dtype)
    w = np.full(O * I + 2 * margin, 0x7FC0 if dtype == "bfloat16" else np.nan, held.dtype)
    w[margin:-margin] = held.reshape(-1)
    all_x, x_values = weights((most, I), x_dtype)
    expected = x_values.astype(np.float64) @ values.astype(np.float64).T
    for R, near in product(range(1, most + 1), (False, True)):
        x = np.full((most, I + 1), 0x7FC0 if x_dtype == "bfloat16" else np.nan, all_x.dtype)
        x[:R, :I] = all_x[:R]
        y = np.full(margin + R * (O + WIDTH), 7, np.float32)
        multiply(y, margin, O + WIDTH, w, margin, x.reshape(-1), 0, I + 1, R, O, I, near)
        found = y[margin:].reshape(R, O + WIDTH)[:, :O]
        np.testing.assert_allclose(found, expected[:R], rtol=1e-4, atol=1e-5)
        assert (y[:margin] == 7).all()
        alone = found[0].copy() if alone is None else alone
        np.testing.assert_array_equal(found[0], alone)
        # As the last row of an odd number a row is a tile by itself, otherwise a part of one.
        multiply(y, margin, O + WIDTH, w, margin, np.ascontiguousarray(x[:R][::-1]).reshape(-1), 0, I + 1, R, O, I, near)
        np.testing.assert_array_equal(y[margin:].reshape(R, O + WIDTH)[::-1][0, :O], alone)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("S", [0, 1, 4, 23])
@pytest.mark.parametrize("count", [1, WIDTH - 1, WIDTH])
def test_weighted_sum(S: int, count: int, dtype: str):
    held, values = weights((S, count), dtype)
    margin, v = 3, np.full((S + 1) * (count + 3), 0x7FC0 if dtype == "bfloat16" else np.nan, held.dtype)
    v[: S * (count + 3)].reshape(S, count + 3)[:, margin:] = held
    a, y = np.random.default_rng(0).standard_normal(S).astype(np.float32), np.empty(WIDTH, np.float32)
    add_up(y, a, v, margin, count + 3, S, count)
    np.testing.assert_allclose(y[:count], a.astype(np.float64) @ values.astype(np.float64), rtol=1e-5, atol=1e-5)
