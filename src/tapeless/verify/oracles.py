"""The oracles: ways to know a derivative that share nothing with a hand-written backward. They see plain functions only.

A *point* is a dict of named tensors, a *direction* a dict with some of those names (a name left out does not move), a
*function* takes a point and returns one number as a tensor (). A *gradient* is a dict too, and claims that the derivative
along v is <gradient, v>.

    adjoint            <J v, u> = <v, J' u>                    linear maps; exact, no step size
    complex step       Im f(x + ih v) / h                      no cancellation, so h = 1e-20 and an error of some ulps
    central difference (f(x + h v) - f(x - h v)) / 2h          error h^2, h^4, … : extrapolated to h = 0
    Taylor remainder   |f(x + h v) - f(x) - h <g, v>|          falls like h^2 under a right gradient, like h under a wrong one
    autograd           of an independent formula               the only one that gives every element
Tested by: tests/verify/test_oracles.py."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tapeless.verify.tolerances import CENTRAL_RATIO

Point = Mapping[str, Tensor]
Function = Callable[[Point], Tensor]  # a point -> ()
Map = Callable[[Point], Point]

COMPLEX_H = 1e-20  # h^2 is far below the last bit of anything, so the truncation error is nil
CENTRAL_H = 1e-3  # extrapolated twice: truncation h^6, rounding ulp/h = 1e-13
TAYLOR_H = tuple(4.0**-k for k in range(1, 13))
TAYLOR_POINTS = 4  # the smallest steps that are clear of rounding: there h^3 no longer mixes in
CLEAR = 1e3  # ulps of f below which a difference is rounding and shows no order


def inner(a: Point, b: Point) -> float:
    """<a, b> over the names of b, in double precision whatever the tensors hold."""
    return sum(float((a[name].double() * b[name].double()).sum()) for name in b)


def norm(a: Point) -> float:
    return math.sqrt(inner(a, a))


def moved(point: Point, direction: Point, step: float | complex) -> dict[str, Tensor]:
    """point + step direction. Integer tensors (tokens, targets) have no direction and stay."""
    return {name: x + step * direction[name] if name in direction else x for name, x in point.items()}


def directional_error(gradient: Point, direction: Point, derivative: float) -> float:
    """How far the claimed <gradient, direction> is from the derivative, relative to |gradient| |direction|: the size it
    would have without cancellation. A claimed gradient that is too small is measured by the derivative instead."""
    scale = max(abs(derivative), norm({name: gradient[name] for name in direction}) * norm(direction))
    gap = abs(inner(gradient, direction) - derivative)
    return gap / scale if scale else gap


def directions(gradient: Point, generator: torch.Generator) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Three unit directions for the tensors of `gradient`: itself, where an error of scale shows best and the derivative
    is far from zero; Gaussian, which sees every element; one slice, where an error of one row is not averaged away."""
    gaussian = {name: torch.randn(g.shape, generator=generator).double() for name, g in gradient.items()}
    slice_ = {name: torch.zeros_like(v) for name, v in gaussian.items()}
    for name, v in gaussian.items():
        row = int(torch.randint(v.shape[0], (), generator=generator)) if v.dim() else ...
        slice_[name][row] = v[row]
    kinds: dict[str, Point] = {"gradient": gradient, "gaussian": gaussian, "slice": slice_}
    for kind, direction in kinds.items():
        size = norm(direction)
        if size:
            yield kind, {name: x / size for name, x in direction.items()}


def adjoint_gap(forward: Map, transpose: Map, v: Point, u: Point) -> float:
    """|<J v, u> - <v, J' u>| relative to the larger of |J v| |u| and |v| |J' u|, for a linear `forward` at input v."""
    jv, jtu = forward(v), transpose(u)
    scale = max(norm(jv) * norm(u), norm(v) * norm(jtu))
    gap = abs(inner(jv, u) - inner(jtu, v))
    return gap / scale if scale else gap


def complex_step(f: Function, point: Point, direction: Point) -> float:
    """The derivative of f along direction. f must be holomorphic and keep complex128 to its end."""
    lifted = {name: x.to(torch.complex128) if x.is_floating_point() else x for name, x in point.items()}
    value = f(moved(lifted, direction, 1j * COMPLEX_H))
    if not value.is_complex():
        raise TypeError(f"the function dropped the imaginary part: it returned {value.dtype}")
    return float(value.imag) / COMPLEX_H


class CentralDifference(NamedTuple):
    value: float  # Richardson-extrapolated twice
    ratio: float | None  # error at h over error at h/2; None where both are rounding, as for a linear function

    @property
    def trusted(self) -> bool:
        """Whether the error falls as theory says. If not, h is outside the regime, or f is not smooth here."""
        return self.ratio is None or abs(self.ratio - 4) <= CENTRAL_RATIO


def central_difference(f: Function, point: Point, direction: Point, h: float = CENTRAL_H) -> CentralDifference:
    """The derivative of f along direction from steps h, h/2 and h/4, and the ratio that shows it can be believed."""
    estimates, size = [], 0.0
    for step in (h, h / 2, h / 4):
        ahead, behind = float(f(moved(point, direction, step))), float(f(moved(point, direction, -step)))
        estimates.append((ahead - behind) / (2 * step))
        size = max(size, abs(ahead), abs(behind))
    d1, d2, d4 = estimates
    rounding = CLEAR * torch.finfo(torch.float64).eps * max(size, abs(d4)) / (h / 4)  # f may be near 0 by cancellation
    ratio = None if abs(d2 - d4) <= rounding else (d1 - d2) / (d2 - d4)
    once, again = d2 + (d2 - d1) / 3, d4 + (d4 - d2) / 3
    return CentralDifference(again + (again - once) / 15, ratio)


def taylor_slope(f: Function, point: Point, direction: Point, derivative: float) -> float:
    """The order at which |f(x + h v) - f(x) - h derivative| vanishes: 2 if the derivative is right, 1 if it is not.

    NaN where fewer than two steps are clear of rounding: f is linear along v, and the remainder has no order."""
    start = float(f(point))
    curve = []
    for h in TAYLOR_H:
        value = float(f(moved(point, direction, h)))
        remainder = abs(value - start - h * derivative)
        if remainder > CLEAR * torch.finfo(torch.float64).eps * max(abs(value), abs(start), abs(derivative)):
            curve.append((math.log(h), math.log(remainder)))
    curve = curve[-TAYLOR_POINTS:]
    if len(curve) < 2:
        return math.nan
    mean_h, mean_r = (sum(axis) / len(curve) for axis in zip(*curve, strict=True))
    covariance = sum((lh - mean_h) * (lr - mean_r) for lh, lr in curve)
    return covariance / sum((lh - mean_h) ** 2 for lh, _ in curve)


def autograd_gradient(f: Function, point: Point) -> dict[str, Tensor]:
    """The gradient of f with respect to every floating-point tensor of the point, by torch's tape: a judge, never a part."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in point.items() if x.is_floating_point()}
    with torch.enable_grad():
        f({**point, **leaves}).backward()
    return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
