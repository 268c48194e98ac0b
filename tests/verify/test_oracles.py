"""The oracles know right from wrong on functions whose derivatives are known without them."""

import math

import pytest
import torch
from torch import Tensor

from tapeless.verify.oracles import (
    Point,
    adjoint_gap,
    autograd_gradient,
    central_difference,
    complex_step,
    directional_error,
    directions,
    inner,
    moved,
    norm,
    taylor_slope,
)
from tapeless.verify.tolerances import ADJOINT, AUTOGRAD, CENTRAL, COMPLEX_STEP, DIRECTION, SLOPE


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


POINT = {"a": randn(5, 3, seed=1), "b": randn(3, seed=2), "tokens": torch.tensor([0, 2, 2])}


def f(point: Point) -> Tensor:
    return (point["a"].exp() * point["b"].sin()).sum() + point["b"][point["tokens"]].prod()


def gradient_of_f(point: Point) -> dict[str, Tensor]:
    a, b = point["a"], point["b"]
    db = (a.exp() * b.cos()).sum(0)
    db[0] += b[2] * b[2]
    db[2] += 2 * b[0] * b[2]
    return {"a": a.exp() * b.sin(), "b": db}


GRADIENT = gradient_of_f(POINT)
ROWS = torch.tensor([1, 0, 2, 3, 4])
WRONG = {
    "zero": {name: torch.zeros_like(g) for name, g in GRADIENT.items()},
    "1.01": {name: 1.01 * g for name, g in GRADIENT.items()},
    "negative": {name: -g for name, g in GRADIENT.items()},
    "rows swapped": {"a": GRADIENT["a"][ROWS], "b": GRADIENT["b"][[2, 1, 0]]},
    "another seed": gradient_of_f({**POINT, "a": randn(5, 3, seed=3), "b": randn(3, seed=4)}),
}


def directions_for(gradient: Point) -> list[dict[str, Tensor]]:
    return [v for _, v in directions(gradient, torch.Generator().manual_seed(5))]


def is_one(slope: float) -> bool:
    """The order of a remainder under a wrong gradient, as close to 1 as a right one must be to 2."""
    return SLOPE[0] <= slope + 1 <= SLOPE[1]


def test_directions_are_three_unit_vectors_of_different_kinds():
    found = dict(directions(GRADIENT, torch.Generator().manual_seed(5)))
    assert list(found) == ["gradient", "gaussian", "slice"]
    assert all(math.isclose(norm(v), 1.0) for v in found.values())
    assert math.isclose(inner(GRADIENT, found["gradient"]), norm(GRADIENT))
    assert (found["gaussian"]["a"] != 0).all()
    assert ((found["slice"]["a"] != 0).sum(), (found["slice"]["b"] != 0).sum()) == (3, 1)


def test_a_zero_gradient_gives_no_direction_but_the_others_remain():
    assert len(directions_for(WRONG["zero"])) == 2


def test_directions_of_a_scalar():
    assert len(directions_for({"x": torch.tensor(2.0, dtype=torch.float64)})) == 3


def test_names_without_a_direction_do_not_move():
    there = moved(POINT, {"a": torch.ones(5, 3, dtype=torch.float64)}, 0.5)
    assert torch.equal(there["a"], POINT["a"] + 0.5)
    assert there["b"] is POINT["b"]
    assert there["tokens"] is POINT["tokens"]


def test_complex_step_is_right_to_the_last_bits():
    for v in directions_for(GRADIENT):
        assert directional_error(GRADIENT, v, complex_step(f, POINT, v)) <= COMPLEX_STEP


def test_complex_step_refuses_a_function_that_drops_the_imaginary_part():
    with pytest.raises(TypeError, match="dropped the imaginary part"):
        complex_step(lambda point: point["b"].real.sum(), POINT, {"b": torch.ones(3, dtype=torch.float64)})


def test_central_difference_extrapolates_and_its_error_falls_by_four():
    for v in directions_for(GRADIENT):
        found = central_difference(f, POINT, v)
        assert directional_error(GRADIENT, v, found.value) <= min(CENTRAL, DIRECTION)
        assert found.ratio is not None
        assert found.trusted


def test_central_difference_of_a_linear_function_has_no_ratio():
    found = central_difference(lambda point: 3 * point["b"].sum(), POINT, {"b": torch.ones(3, dtype=torch.float64)})
    assert found.ratio is None
    assert found.trusted
    assert math.isclose(found.value, 9.0, rel_tol=CENTRAL)


def test_central_difference_over_a_kink_is_not_trusted():
    x = {"x": torch.tensor([2e-4], dtype=torch.float64)}
    found = central_difference(lambda point: point["x"].clamp_min(0).sum(), x, {"x": torch.ones(1, dtype=torch.float64)})
    assert not found.trusted


def test_taylor_slope_is_two():
    for v in directions_for(GRADIENT):
        assert SLOPE[0] <= taylor_slope(f, POINT, v, inner(GRADIENT, v)) <= SLOPE[1]


def test_taylor_slope_of_a_linear_function_is_nothing_to_see():
    v = {"b": torch.ones(3, dtype=torch.float64)}
    assert math.isnan(taylor_slope(lambda point: 3 * point["b"].sum(), POINT, v, 9.0))


def test_taylor_slope_of_a_slightly_wrong_derivative_is_one():
    """An error of one in ten thousand shows as plainly as one of a half."""
    for v in directions_for(GRADIENT):
        for factor in (0.5, 1.0001):
            assert is_one(taylor_slope(f, POINT, v, factor * inner(GRADIENT, v)))


def test_autograd_gradient_leaves_no_trace():
    found = autograd_gradient(f, POINT)
    assert found.keys() == GRADIENT.keys()
    for name, g in GRADIENT.items():
        assert (found[name] - g).abs().max() <= AUTOGRAD * g.abs().max()
        assert not POINT[name].requires_grad


def test_autograd_gradient_of_a_tensor_not_used_is_zero():
    assert torch.equal(autograd_gradient(lambda point: point["b"].sum(), POINT)["a"], torch.zeros(5, 3, dtype=torch.float64))


@pytest.mark.parametrize("wrong", WRONG)
def test_null_check_by_direction(wrong: str):
    """Each of the five wrong gradients is seen by every oracle, in at least one of its own directions."""
    claimed = WRONG[wrong]
    for name in claimed:
        own = {name: claimed[name]}
        found = directions_for(own)
        assert any(directional_error(own, v, complex_step(f, POINT, v)) > COMPLEX_STEP for v in found)
        assert any(directional_error(own, v, central_difference(f, POINT, v).value) > CENTRAL for v in found)
        assert any(is_one(taylor_slope(f, POINT, v, inner(own, v))) for v in found)


MATRIX = randn(4, 6, seed=6)
WRONG_MATRIX = {
    "zero": torch.zeros_like(MATRIX),
    "1.01": 1.01 * MATRIX,
    "negative": -MATRIX,
    "rows swapped": MATRIX[[1, 0, 2, 3]],
    "another seed": randn(4, 6, seed=7),
}


def gap(claimed: Tensor, dtype: torch.dtype) -> float:
    """Of the map v -> M v, and the transpose that `claimed` would have."""
    v, u = ({"x": randn(n, seed=8 + n).to(dtype)} for n in (6, 4))
    return adjoint_gap(lambda p: {"x": MATRIX.to(dtype) @ p["x"]}, lambda p: {"x": claimed.to(dtype).t() @ p["x"]}, v, u)


@pytest.mark.parametrize("dtype", ADJOINT)
def test_adjoint(dtype: str):
    assert gap(MATRIX, getattr(torch, dtype)) <= ADJOINT[dtype]


@pytest.mark.parametrize("dtype", ADJOINT)
@pytest.mark.parametrize("wrong", WRONG_MATRIX)
def test_null_check_of_adjoint(wrong: str, dtype: str):
    assert gap(WRONG_MATRIX[wrong], getattr(torch, dtype)) > ADJOINT[dtype]


def test_nan_is_never_within_a_bound():
    nan = {"b": torch.full((3,), torch.nan, dtype=torch.float64)}
    assert not directional_error(nan, {"b": torch.ones(3, dtype=torch.float64)}, 1.0) <= CENTRAL
    assert not gap(torch.full((4, 6), torch.nan), torch.float64) <= ADJOINT["float64"]
