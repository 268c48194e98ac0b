"""What every op must do, whatever it computes. A kernel passes the same suite as the op it replaces:

check_behaviour     the promises of ops/op.py, in the dtype that the op runs in
check_mathematics   values and gradients by every oracle, in float64: what only plain torch can do
check_precision     float32 within its bound; bfloat16 no worse than a small multiple of the reference op's own error"""

from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor

from tapeless.verify.cases import CASES, OpCase
from tapeless.verify.finding import distance
from tapeless.verify.op_levels import against_float64, check_case
from tapeless.verify.oracles import Point, norm
from tapeless.verify.tolerances import (
    ACCUMULATION,
    KERNEL_BACKWARD,
    KERNEL_FORWARD,
    OP_BFLOAT16,
    OP_FLOAT32,
    ROUNDING_FLOOR,
    TWIN,
)

REFERENCE = {case.name: case.op for case in CASES}


def each_case(family: str) -> pytest.MarkDecorator:
    """Run a test for every case of one file of ops/."""
    chosen = [case for case in CASES if case.family == family]
    return pytest.mark.parametrize("case", chosen, ids=attrgetter("name"))


def check_op(case: OpCase) -> None:
    check_behaviour(case)
    check_mathematics(case)
    check_precision(case)


def check_behaviour(case: OpCase, dtype: torch.dtype = torch.float64) -> None:
    point = case.inputs(dtype=dtype)
    upstream = case.upstream(point)
    check_no_tape(case, point, upstream)
    check_second_backward(case, point, upstream)
    check_frozen(case, point, upstream)
    check_repeatable(case, point, upstream)
    check_strides(case, point, upstream)
    check_nan_passes(case, point, upstream)
    check_saved_names(case, point)


def check_mathematics(case: OpCase) -> None:
    failed = [str(finding) for finding in check_case(case) if not finding.ok]
    assert not failed, "\n".join(failed)
    check_one_position(case)


def check_precision(case: OpCase) -> None:
    for T in (7, 1):
        for name, (out, truth) in against_float64(case, torch.float32, T).items():
            if not _zero_by_identity(case, name, T):
                assert distance(out, truth).largest <= OP_FLOAT32, f"{case.name} {name} in float32, T={T}"
    reference = against_float64(replace(case, op=REFERENCE[case.name]), torch.bfloat16)
    for name, (out, truth) in against_float64(case, torch.bfloat16).items():
        error = distance(out, truth).largest
        assert error <= OP_BFLOAT16, f"{case.name} {name} in bfloat16"
        factor = KERNEL_FORWARD if name in case.outputs else KERNEL_BACKWARD
        allowed = max(factor * distance(*reference[name]).largest, torch.finfo(out.dtype).eps)
        assert error <= allowed, f"{case.name} {name} in bfloat16, against the reference op"


def _zero_by_identity(case: OpCase, name: str, T: int) -> bool:
    return T == 1 and name.removeprefix("d") in case.zero_at_one


def check_one_position(case: OpCase) -> None:
    """T = 1. What is zero there by identity has no relative error; it must be rounding beside the other gradients."""
    found = against_float64(case, torch.float64, T=1)
    whole = norm({name: truth for name, (_, truth) in found.items() if name not in case.outputs})
    for name, (out, truth) in found.items():
        if _zero_by_identity(case, name, T=1):
            assert float(out.abs().max()) <= ROUNDING_FLOOR * whole, f"{case.name} {name} is not zero where T=1"
        else:
            assert distance(out, truth).largest <= TWIN, f"{case.name} {name} where T=1"


def check_repeatable(case: OpCase, point: Point, upstream: Point) -> None:
    for first, second in zip(results(case, point, upstream), results(case, point, upstream), strict=True):
        assert_same_bits(first, second, f"{case.name} on repetition")


def check_strides(case: OpCase, point: Point, upstream: Point) -> None:
    """Activations and upstream gradients may be views: every second element of a buffer of garbage, or transposed."""
    bound = TWIN if next(iter(upstream.values())).dtype == torch.float64 else OP_FLOAT32
    expected = results(case, point, upstream)
    for view in (_spread, _transposed):
        views = {name: view(x) if name in case.activations else x for name, x in point.items()}
        found = results(case, views, {name: view(dy) for name, dy in upstream.items()})
        for out, truth in zip(found, expected, strict=True):
            for name in truth:
                assert distance(out[name], truth[name]).largest <= bound, f"{case.name} {name} of views ({view.__name__})"


def _spread(x: Tensor) -> Tensor:
    garbage = torch.full_like(x, torch.nan if x.is_floating_point() else -1)
    return torch.stack([x, garbage], -1)[..., 0]


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x


def check_second_backward(case: OpCase, point: Point, upstream: Point) -> None:
    """A second call adds the same to the parameters' gradients, returns the same, and has written to nothing else."""
    _, saved = case.forward(point)
    owned = {**point, **{f"d{name}": dy for name, dy in upstream.items()}}
    owned |= {f"saved {i}": x for i, x in enumerate(tensors_in(saved))}
    before = {name: x.clone() for name, x in owned.items()}
    dparams = case.new_dparams(point)
    first = {name: x.clone() for name, x in case.backward(upstream, saved, point, dparams).items()}
    once = {name: x.clone() for name, x in dparams.items()}
    second = case.backward(upstream, saved, point, dparams)
    assert_same_bits(before, owned, f"{case.name}: backward wrote to what is not its own")
    assert_same_bits(first, second, f"{case.name}, second backward")
    bound = ACCUMULATION[str(next(iter(upstream.values())).dtype).removeprefix("torch.")]
    for name, twice in dparams.items():
        assert distance(twice, 2 * once[name]).largest <= bound, f"{case.name}: d{name} is not added to"


def check_frozen(case: OpCase, point: Point, upstream: Point) -> None:
    """A parameter without a gradient buffer changes nothing for the others, nor for the activations."""
    _, saved = case.forward(point)
    expected = case.new_dparams(point)
    dx = case.backward(upstream, saved, point, expected)
    for frozen in [*([name] for name in expected), list(expected)]:
        dparams = {name: x for name, x in case.new_dparams(point).items() if name not in frozen}
        assert_same_bits(dx, case.backward(upstream, saved, point, dparams), f"{case.name}, {frozen} frozen")
        assert_same_bits({name: expected[name] for name in dparams}, dparams, f"{case.name}, {frozen} frozen")


def check_nan_passes(case: OpCase, point: Point, upstream: Point) -> None:
    """A NaN where it matters most in any input reaches an output, and one in any upstream gradient reaches a gradient."""
    for name, g in case.gradients(point, upstream).items():
        outputs, _ = case.forward({**point, name: _with_nan(point[name], int(g.abs().argmax()))})
        assert any(y.isnan().any() for y in outputs.values()), f"{case.name} hides a NaN in {name}"
    for name, dy in upstream.items():
        gradients = case.gradients(point, {**upstream, name: _with_nan(dy, 0)})
        assert any(g.isnan().any() for g in gradients.values()), f"{case.name} hides a NaN in d{name}"


def _with_nan(x: Tensor, index: int) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    x.view(-1)[index] = torch.nan
    return x


def check_saved_names(case: OpCase, point: Point) -> None:
    """A field that bears the name of an activation or an output is that very tensor: recomputation drops it by name."""
    outputs, saved = case.forward(point)
    named = {name: point[name] for name in case.activations if name in point} | outputs
    for name in getattr(saved, "_fields", ()):
        kept = getattr(saved, name)
        assert name not in case.params, f"{case.name} saves the parameter {name}"
        if name in named and kept is not None:
            assert kept is named[name], f"{case.name}: saved.{name} is another tensor than {name}"


def check_no_tape(case: OpCase, point: Point, upstream: Point) -> None:
    with torch.enable_grad():
        outputs, saved = case.forward(point)
        gradients = case.gradients(point, upstream)
    for x in [*outputs.values(), *tensors_in(saved), *gradients.values()]:
        assert not x.requires_grad, f"{case.name} has left a tape"


def results(case: OpCase, point: Point, upstream: Point) -> tuple[Point, Point]:
    return case.forward(point)[0], case.gradients(point, upstream)


def tensors_in(saved: Any) -> Iterable[Tensor]:
    """Every tensor of a record, and of the records in it."""
    if isinstance(saved, Tensor):
        yield saved
    elif isinstance(saved, tuple):
        for part in saved:
            yield from tensors_in(part)


def assert_same_bits(expected: Point, found: Point, what: str) -> None:
    assert expected.keys() == found.keys(), what
    for name, x in expected.items():
        assert torch.equal(x, found[name]), f"{what}: {name} differs"
