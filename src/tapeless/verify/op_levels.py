"""L0 and L1: each op by itself, every gradient tensor by every oracle.

L0 checks the linear pieces by the adjoint test. L1 checks all ops: the values against an independent formula, the gradients
against complex step, central differences and autograd of that formula in float64, float32 and bfloat16 against those results,
and whether a second backward adds to the parameters' gradients.
Tested by: tests/verify/test_op_levels.py."""

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from tapeless.verify import op_fixtures
from tapeless.verify.cases import OpCase, cases
from tapeless.verify.finding import Finding, distance
from tapeless.verify.oracles import (
    Point,
    adjoint_gap,
    autograd_gradient,
    central_difference,
    complex_step,
    directional_error,
    directions,
    norm,
)
from tapeless.verify.tolerances import ACCUMULATION, ADJOINT, AUTOGRAD, CENTRAL, COMPLEX_STEP, OP_FLOAT32, UNDERPOWERED


def level_0() -> Iterator[Finding]:
    for case in cases():
        yield from adjoint_findings(case, ADJOINT)


def adjoint_findings(case: OpCase, dtypes: Iterable[str]) -> Iterator[Finding]:
    for operand in case.linear_in:
        for dtype in dtypes:
            error = adjoint_error(case, operand, getattr(torch, dtype))
            yield Finding("L0", case.name, f"adjoint {dtype}", f"d{operand}", error, ADJOINT[dtype])


def adjoint_error(case: OpCase, operand: str, dtype: torch.dtype) -> float:
    """J is the op as a function of one operand, less its value at zero; J' is its backward."""
    point = case.inputs(dtype=dtype)
    upstream = case.upstream(point)
    constant, _ = case.forward({**point, operand: torch.zeros_like(point[operand])})

    def forward(v: Point) -> Point:
        return {name: y - constant[name] for name, y in case.forward({**point, **v})[0].items()}

    def transpose(u: Point) -> Point:
        return {operand: case.gradients(point, u)[operand]}

    v = op_fixtures.normal(torch.Generator().manual_seed(2), *point[operand].shape).to(point[operand])
    return adjoint_gap(forward, transpose, {operand: v}, upstream)


def level_1(only: str | None = None) -> Iterator[Finding]:
    for case in cases(only):
        yield from check_case(case)


def check_case(case: OpCase) -> Iterator[Finding]:
    """All oracles on one case. A gradient that is too small compared with the others would prove nothing, so it fails."""
    point = case.inputs()
    upstream = case.upstream(point)
    claimed = case.gradients(point, upstream)
    by_autograd = autograd_gradient(case.formula_objective(upstream), point)
    outputs, _ = case.forward(point)
    for name, y in case.formula_outputs(point).items():
        yield _compared(case, "reference formula", name, outputs[name], y, AUTOGRAD)
    whole = norm(by_autograd)
    for name, truth in by_autograd.items():
        if norm({name: truth}) < UNDERPOWERED * whole:
            yield Finding("L1", case.name, "underpowered", f"d{name}", math.inf, 0.0)
        yield _compared(case, "autograd reference", f"d{name}", claimed[name], truth, AUTOGRAD)
        yield from _by_direction(case, name, point, upstream, claimed[name])
    yield from _accumulates(case, point, upstream, claimed)
    yield from in_narrow(case)


def _compared(case: OpCase, oracle: str, tensor: str, claimed: Tensor, truth: Tensor, bound: float) -> Finding:
    gap = distance(claimed, truth)
    return Finding("L1", case.name, oracle, tensor, max(gap.largest, gap.l2), bound, gap.where)


def _by_direction(case: OpCase, name: str, point: Point, upstream: Point, claimed: Tensor) -> Iterator[Finding]:
    """Worst of the three directions. A difference quotient whose error does not fall as it should counts as a failure."""
    f = case.objective(upstream)

    def difference(v: Point) -> float:
        estimate = central_difference(f, point, v)
        return estimate.value if estimate.trusted else math.nan

    oracles: dict[str, tuple[Callable[[Point], float], float]] = {
        "complex step": (lambda v: complex_step(f, point, v), COMPLEX_STEP),
        "central difference": (difference, CENTRAL),
    }
    for oracle, (derivative, bound) in oracles.items():
        generator = torch.Generator().manual_seed(3)
        errors = [directional_error({name: claimed}, v, derivative(v)) for _, v in directions({name: claimed}, generator)]
        error = math.inf if any(map(math.isnan, errors)) else max(errors)
        yield Finding("L1", case.name, oracle, f"d{name}", error, bound)


def _accumulates(case: OpCase, point: Point, upstream: Point, claimed: Point) -> Iterator[Finding]:
    _, saved = case.forward(point)
    dparams = case.new_dparams(point)
    for _ in range(2):
        case.backward(upstream, saved, point, dparams)
    for name, twice in dparams.items():
        yield _compared(case, "accumulation", f"d{name}", twice, 2 * claimed[name], ACCUMULATION["float64"])


def in_narrow(case: OpCase, dtypes: Iterable[str] = ("float32", "bfloat16")) -> Iterator[Finding]:
    """Values and gradients in float32, and in bfloat16 those that are summed in float32 and never rounded on the way: such
    a sum must be as good as float32's, whatever the dtype of the inputs."""
    for name, (claimed, truth) in against_float64(case, torch.float32).items():
        yield _compared(case, "float32", name, claimed, truth, OP_FLOAT32)
    if case.wide and "bfloat16" in dtypes:
        found = against_float64(case, torch.bfloat16)
        for name in case.wide:
            yield _compared(case, "bfloat16 sums", name, *found[name], OP_FLOAT32)


def against_float64(case: OpCase, dtype: torch.dtype, seed: int = 0) -> dict[str, tuple[Tensor, Tensor]]:
    """Each output and gradient of the op in a narrow dtype, and the formula's in float64 on the CPU at the same numbers."""
    point = case.inputs(seed, dtype)
    upstream = case.upstream(point, seed)
    outputs, _ = case.forward(point)
    wide, wide_upstream = (
        {name: x.to("cpu", torch.float64 if x.is_floating_point() else None) for name, x in tensors.items()}
        for tensors in (point, upstream)
    )
    truth = case.formula_outputs(wide)
    truth |= {f"d{name}": g for name, g in autograd_gradient(case.formula_objective(wide_upstream), wide).items()}
    claimed = outputs | {f"d{name}": g for name, g in case.gradients(point, upstream).items()}
    return {name: (claimed[name], truth[name]) for name in truth}
