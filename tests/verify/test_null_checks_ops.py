"""A check that cannot fail is a defect: with a wrong gradient every assertion about every tensor of every op must fail, and
each promise of the contract must be seen to be broken."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from contract import check_op
from tapeless.ops.linear import LINEAR, LinearSaved
from tapeless.ops.op import Op
from tapeless.verify.cases import CASES, OpCase
from tapeless.verify.op_levels import adjoint_error, check_case
from tapeless.verify.oracles import Point
from tapeless.verify.tolerances import ADJOINT

Wrong = Callable[[Tensor, Tensor], Tensor]  # the right gradient, another seed's -> a wrong one


def swapped(g: Tensor, other: Tensor) -> Tensor:
    """The largest and the smallest row exchanged; the elements of a vector are its rows."""
    rows = g.reshape(-1, g.shape[-1]) if g.dim() > 1 else g.reshape(-1, 1)
    sizes = rows.double().norm(dim=1)
    largest, smallest = int(sizes.argmax()), int(sizes.argmin())
    order = list(range(len(rows)))
    order[largest], order[smallest] = smallest, largest
    return rows[order].reshape(g.shape)


WRONG: dict[str, Wrong] = {
    "zero": lambda g, other: torch.zeros_like(g),
    "1.01": lambda g, other: 1.01 * g,
    "negative": lambda g, other: -g,
    "rows swapped": swapped,
    "another seed": lambda g, other: other,
}


@dataclass(frozen=True)
class Corrupted(OpCase):
    """A case whose gradients are all wrong in one way. Its values stay right."""

    wrong: Wrong = swapped

    def gradients(self, point: Point, upstream: Point) -> dict[str, Tensor]:
        right = super().gradients(point, upstream)
        dtype = next(x.dtype for x in point.values() if x.is_floating_point())
        elsewhere = self.inputs(seed=1, dtype=dtype)
        other = super().gradients(elsewhere, self.upstream(elsewhere, seed=1))
        return {name: self.wrong(g, other[name]) for name, g in right.items()}


def corrupted(case: OpCase, wrong: str) -> Corrupted:
    return Corrupted(**{field.name: getattr(case, field.name) for field in fields(case)}, wrong=WRONG[wrong])


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("case", CASES, ids=attrgetter("name"))
def test_level_1_sees_a_wrong_gradient_by_every_oracle(case: OpCase, wrong: str):
    findings = [finding for finding in check_case(corrupted(case, wrong)) if finding.tensor not in case.outputs]
    assert {"autograd reference", "complex step", "central difference", "float32"} <= {finding.oracle for finding in findings}
    for finding in findings:
        assert not finding.ok, finding


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("case", [case for case in CASES if case.linear_in], ids=attrgetter("name"))
def test_level_0_sees_a_wrong_gradient(case: OpCase, wrong: str):
    for operand in case.linear_in:
        for dtype, bound in ADJOINT.items():
            assert adjoint_error(corrupted(case, wrong), operand, getattr(torch, dtype)) > bound


def changed(
    forward: Callable[..., Any] = LINEAR.forward,
    backward: Callable[..., Any] = LINEAR.backward,
) -> Op:
    return Op(forward, backward)


class SavesParameter(NamedTuple):
    x: Tensor  # (..., I)
    w: Tensor  # (O, I)


def saving_a_copy(x: Tensor, w: Tensor, b: Tensor) -> Any:
    y, saved = LINEAR.forward(x, w, b)
    return y, LinearSaved(saved.x.clone())


def saving_a_parameter(x: Tensor, w: Tensor, b: Tensor) -> Any:
    return LINEAR.forward(x, w, b)[0], SavesParameter(x, w)


def wrong_value(x: Tensor, w: Tensor, b: Tensor) -> Any:
    y, saved = LINEAR.forward(x, w, b)
    return y + 1e-9, saved


def random_value(x: Tensor, w: Tensor, b: Tensor) -> Any:
    y, saved = LINEAR.forward(x, w, b)
    return y * (1 + 1e-13 * torch.rand(()).to(y.dtype)), saved


def hidden_nan(x: Tensor, w: Tensor, b: Tensor) -> Any:
    y, saved = LINEAR.forward(x, w, b)
    return y.nan_to_num(), saved


def blind_to_strides(x: Tensor, w: Tensor, b: Tensor) -> Any:
    y, _ = LINEAR.forward(x.as_strided(x.shape, torch.empty(x.shape).stride()), w, b)
    return y, LinearSaved(x)


def taped(x: Tensor, w: Tensor, b: Tensor) -> Any:
    y, saved = LINEAR.forward(x, w, b)
    return y.requires_grad_(), saved


def coarse(dtype: torch.dtype, error: float) -> Callable[..., Any]:
    def forward(x: Tensor, w: Tensor, b: Tensor) -> Any:
        y, saved = LINEAR.forward(x, w, b)
        return y * (1 + error * (y.dtype == dtype)), saved

    return forward


def non_accumulating(dy: Tensor, saved: LinearSaved, w: Tensor, b: Tensor, dw: Tensor | None, db: Tensor | None) -> Tensor:
    if dw is not None:
        dw.zero_()
    return LINEAR.backward(dy, saved, w, b, dw, db)


def writing_dy(dy: Tensor, saved: LinearSaved, *rest: Tensor | None) -> Tensor:
    dx = LINEAR.backward(dy, saved, *rest)
    dy.mul_(0.5)
    return dx


def writing_saved(dy: Tensor, saved: LinearSaved, *rest: Tensor | None) -> Tensor:
    dx = LINEAR.backward(dy, saved, *rest)
    saved.x.mul_(0.5)
    return dx


def needing_dw(dy: Tensor, saved: LinearSaved, w: Tensor, b: Tensor, dw: Tensor | None, db: Tensor | None) -> Tensor:
    return LINEAR.backward(dy, saved, w, b, dw, db if dw is not None else None)


def hiding_nan_of_dy(dy: Tensor, saved: LinearSaved, *rest: Tensor | None) -> Tensor:
    return LINEAR.backward(dy.nan_to_num(), saved, *rest)


def wrong_at_one_position(dy: Tensor, saved: LinearSaved, *rest: Tensor | None) -> Tensor:
    return LINEAR.backward(dy, saved, *rest) * (1.0 if dy.shape[1] > 1 else 1.001)


BROKEN = {
    "wrong value": (changed(forward=wrong_value), r"linear\[bias\] y by reference formula"),
    "random value": (changed(forward=random_value), "y by repetition"),
    "hidden NaN": (changed(forward=hidden_nan), " x by NaN passes"),
    "hidden NaN of dy": (changed(backward=hiding_nan_of_dy), "dy by NaN passes"),
    "blind to strides": (changed(forward=blind_to_strides), "y by strides"),
    "saves a copy": (changed(forward=saving_a_copy), "x by saved by name is that tensor"),
    "saves a parameter": (
        changed(saving_a_parameter, lambda dy, saved, *rest: LINEAR.backward(dy, LinearSaved(saved.x), *rest)),
        "w by no parameter saved",
    ),
    "leaves a tape": (changed(forward=taped), "y by no tape"),
    "overwrites dw": (changed(backward=non_accumulating), "w by adds"),
    "writes dy": (changed(backward=writing_dy), "dy by writes to nothing of others"),
    "writes saved": (changed(backward=writing_saved), "x by writes to nothing of others"),
    "needs dw": (changed(backward=needing_dw), "b by w frozen"),
    "wrong at T=1": (changed(backward=wrong_at_one_position), "where T=1"),
    "coarse in float32": (changed(forward=coarse(torch.float32, 1e-4)), "y by float32"),
    "coarse in bfloat16": (changed(forward=coarse(torch.bfloat16, 2e-2)), "y by bfloat16 of the reference"),
    "useless in bfloat16": (changed(forward=coarse(torch.bfloat16, 0.1)), "y by bfloat16:"),
}
BIASED = next(case for case in CASES if case.name == "linear[bias]")


@pytest.mark.parametrize("broken", BROKEN)
def test_contract_sees_a_broken_promise(broken: str):
    op, complaint = BROKEN[broken]
    with pytest.raises(AssertionError, match=complaint):
        check_op(replace(BIASED, op=op))
