"""The promises of ops/op.py, which the rest of the code relies on for every op in every dtype.

    no tape                 no result of an op requires a gradient of torch
    accumulation            a second backward adds to the parameters' gradients, returns the same, and writes to nothing else
    frozen                  a parameter without a gradient buffer changes nothing for the others
    repetition              the same bits again, also where other inputs pass between a forward and its backward
    strides                 activations and upstream gradients may be views
    NaN                     one in any input reaches an output, and one in any upstream gradient a gradient
    saved names             a field that bears the name of an activation or an output is that tensor; no parameter is saved
Tested by: tests/verify/test_null_checks_ops.py."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from tapeless.verify.cases import OpCase
from tapeless.verify.finding import Finding, distance
from tapeless.verify.oracles import Point
from tapeless.verify.tolerances import ACCUMULATION, AUTOGRAD, OP_BFLOAT16, OP_FLOAT32

STRIDES = {"float64": AUTOGRAD, "float32": OP_FLOAT32, "bfloat16": OP_BFLOAT16}  # other strides, other matmuls


def promises(case: OpCase, dtype: str) -> Iterator[Finding]:
    point = case.inputs(dtype=getattr(torch, dtype))
    upstream = case.upstream(point)
    yield from no_tape(case, point, upstream)
    yield from accumulation(case, point, upstream, ACCUMULATION[dtype])
    yield from frozen(case, point, upstream)
    yield from repetition(case, point, upstream)
    yield from strides(case, point, upstream, STRIDES[dtype])
    yield from nan_passes(case, point, upstream)
    yield from saved_names(case, point)


def _finding(case: OpCase, oracle: str, tensor: str, error: float, bound: float = 0.0) -> Finding:
    return Finding("L1", case.name, oracle, tensor, error, bound)


def _equal(case: OpCase, oracle: str, found: Point, expected: Point, bound: float = 0.0) -> Iterator[Finding]:
    """Tensor by tensor; by default bit for bit."""
    for name, truth in expected.items():
        gap = distance(found[name], truth)
        yield Finding("L1", case.name, oracle, name, gap.largest, bound, gap.where)


def results(case: OpCase, point: Point, upstream: Point) -> dict[str, Tensor]:
    """Outputs by name, and each gradient under d + name."""
    gradients = case.gradients(point, upstream)
    return case.forward(point)[0] | {f"d{name}": g for name, g in gradients.items()}


def copies(tensors: Point) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in tensors.items()}


def tensors_in(saved: Any) -> Iterable[Tensor]:
    """Every tensor of a record, and of the records in it."""
    if isinstance(saved, Tensor):
        yield saved
    elif isinstance(saved, tuple):
        for part in saved:
            yield from tensors_in(part)


def no_tape(case: OpCase, point: Point, upstream: Point) -> Iterator[Finding]:
    with torch.enable_grad():
        found = results(case, point, upstream)
        found |= {f"saved {i}": x for i, x in enumerate(tensors_in(case.forward(point)[1]))}
    for name, x in found.items():
        yield _finding(case, "no tape", name, float(x.requires_grad))


def accumulation(case: OpCase, point: Point, upstream: Point, bound: float) -> Iterator[Finding]:
    _, saved = case.forward(point)
    owned = {**point, **{f"d{name}": dy for name, dy in upstream.items()}}
    owned |= {f"saved {i}": x for i, x in enumerate(tensors_in(saved))}
    before = copies(owned)
    dparams = case.new_dparams(point)
    first = copies(case.backward(upstream, saved, point, dparams))
    once = copies(dparams)
    second = case.backward(upstream, saved, point, dparams)
    yield from _equal(case, "writes to nothing of others", owned, before)
    yield from _equal(case, "second backward", second, first)
    yield from _equal(case, "adds", dparams, {name: 2 * g for name, g in once.items()}, bound)


def frozen(case: OpCase, point: Point, upstream: Point) -> Iterator[Finding]:
    _, saved = case.forward(point)
    expected = case.new_dparams(point)
    dx = case.backward(upstream, saved, point, expected)
    for names in [*([name] for name in expected), list(expected)]:
        dparams = {name: x for name, x in case.new_dparams(point).items() if name not in names}
        oracle = f"{', '.join(names)} frozen"
        yield from _equal(case, oracle, case.backward(upstream, saved, point, dparams), dx)
        yield from _equal(case, oracle, dparams, {name: expected[name] for name in dparams})


def repetition(case: OpCase, point: Point, upstream: Point) -> Iterator[Finding]:
    expected = copies(results(case, point, upstream))
    yield from _equal(case, "repetition", results(case, point, upstream), expected)
    outputs, saved = case.forward(point)
    elsewhere = case.inputs(seed=1, dtype=next(x.dtype for x in point.values() if x.is_floating_point()))
    case.gradients(elsewhere, case.upstream(elsewhere, seed=1))
    dparams = case.new_dparams(point)
    gradients = {**case.backward(upstream, saved, point, dparams), **dparams}
    found = outputs | {f"d{name}": g for name, g in gradients.items()}
    yield from _equal(case, "other work in between", found, expected)


def strides(case: OpCase, point: Point, upstream: Point, bound: float) -> Iterator[Finding]:
    """Every second element of a buffer of garbage, or transposed."""
    expected = results(case, point, upstream)
    for view in (_spread, _transposed):
        views = {name: view(x) if name in case.activations else x for name, x in point.items()}
        found = results(case, views, {name: view(dy) for name, dy in upstream.items()})
        yield from _equal(case, "strides", found, expected, bound)


def _spread(x: Tensor) -> Tensor:
    garbage = torch.full_like(x, torch.nan if x.is_floating_point() else -1)
    return torch.stack([x, garbage], -1)[..., 0]


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x


def nan_passes(case: OpCase, point: Point, upstream: Point) -> Iterator[Finding]:
    """In an input it is put where the gradient is largest."""
    for name, g in case.gradients(point, upstream).items():
        outputs, _ = case.forward({**point, name: _with_nan(point[name], int(g.abs().argmax()))})
        yield _finding(case, "NaN passes", name, float(not any(y.isnan().any() for y in outputs.values())))
    for name, dy in upstream.items():
        gradients = case.gradients(point, {**upstream, name: _with_nan(dy, 0)})
        yield _finding(case, "NaN passes", f"d{name}", float(not any(g.isnan().any() for g in gradients.values())))


def _with_nan(x: Tensor, index: int) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    x.view(-1)[index] = torch.nan
    return x


def saved_names(case: OpCase, point: Point) -> Iterator[Finding]:
    """Recomputation drops an activation by its name, and the optimizer may free a parameter."""
    outputs, saved = case.forward(point)
    named = {name: point[name] for name in case.activations if name in point} | outputs
    yield _finding(case, "saved is a NamedTuple or None", "saved", float(saved is not None and not hasattr(saved, "_fields")))
    for name in getattr(saved, "_fields", ()):
        kept = getattr(saved, name)
        yield _finding(case, "no parameter saved", name, float(name in case.params))
        if name in named and kept is not None:
            yield _finding(case, "saved by name is that tensor", name, float(kept is not named[name]))
