"""The exponential and its relatives against numpy's in float64."""

import numba
import numpy as np
import pytest

pytest.importorskip("numba")

from tapeless.kernels.cpu.functions import exp, gelu_tanh, sigmoid, tanh


def applied(function, x: np.ndarray) -> np.ndarray:
    @numba.njit(error_model="numpy")
    def run(x, y):
        for i in range(len(x)):
            y[i] = function(x[i])

    y = np.empty_like(x)
    run(x, y)
    return y


def test_exp_is_right_to_a_rounding():
    x = np.linspace(-87, 88, 1_000_001).astype(np.float32)
    truth = np.exp(x.astype(np.float64))
    assert np.max(np.abs(applied(exp, x) / truth - 1)) < 2**-23


def test_the_ends_of_exp():
    found = applied(exp, np.array([np.nan, np.inf, -np.inf, 0, 1e-30, 100, -200], np.float32))
    assert np.isnan(found[0])
    assert found[1] == found[5] == np.inf
    assert 0 <= found[2] < 2e-38
    assert 0 <= found[6] < 2e-38
    assert (found[3:5] == 1).all()


@pytest.mark.parametrize(
    ("function", "truth"),
    [
        (sigmoid, lambda x: 1 / (1 + np.exp(-x))),
        (tanh, np.tanh),
        (gelu_tanh, lambda x: np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    ],
    ids=["sigmoid", "tanh", "gelu_tanh"],
)
def test_relatives(function, truth):
    x = np.concatenate([np.linspace(-30, 30, 100_001), [np.inf, -np.inf]]).astype(np.float32)
    assert np.max(np.abs(applied(function, x) - truth(x.astype(np.float64)))) < 3e-7
    assert np.isnan(applied(function, np.array([np.nan], np.float32))).all()


@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.1, 0.1999, 0.2001, 0.5, 3.0, 20.0])
def test_tanh_is_right_in_relation_to_itself(size: float):
    """Where it is small too: a difference of two numbers near 1 would leave few digits."""
    x = np.linspace(-size, size, 2001, dtype=np.float32)
    found = applied(tanh, x)
    true = np.tanh(x.astype(np.float64))
    assert np.all(np.abs(found - true) <= 1.5e-6 * np.abs(true))
