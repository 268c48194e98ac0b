"""dx and dw apart: backward with dparams of None and backward_dw together give the bits of the joint backward, in every set and
its non-accumulating variant. Triton's kernels run in its interpreter here; on a GPU, on the GPU."""

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor

from tapeless.ops.op import Op, OpSet
from tapeless.ops.reference import REFERENCE
from tapeless.verify.cases import CASES, OpCase, cases_of

ON_GPU = torch.cuda.is_available()
SETS = ["reference", "cpu", "triton", "triton-fp8"]
SEPARABLE = {"linear", "ffn_down"}


def build(name: str) -> OpSet:
    if name == "reference":
        return REFERENCE
    pytest.importorskip("numba" if name == "cpu" else "triton")
    if name == "cpu":
        from tapeless.kernels.cpu.ops import cpu_ops

        return cpu_ops()
    from tapeless.kernels.triton.ops import fp8_ops, triton_ops

    return triton_ops() if name == "triton" else fp8_ops()


def cases(ops: OpSet, device: str) -> Iterator[OpCase]:
    for case in cases_of(ops):
        if case.family in SEPARABLE:
            yield replace(case.at(B=2, T=8, C=16, F=32), device=device)  # sizes that fp8 supports


def joint_and_apart(case: OpCase, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    assert case.op.backward_dw is not None
    point = case.inputs(dtype=dtype)
    upstream, (_, saved) = case.upstream(point), case.forward(point)
    params = [point.get(name) for name in case.params]
    dy = [upstream.get(name) for name in case.outputs]

    def grads() -> list[Any]:
        wide = torch.promote_types(dtype, torch.float32)
        return [None if p is None else torch.arange(p.numel()).view(p.shape).to(p.device, wide) / 7 for p in params]

    joint, apart = grads(), grads()
    joint_dx = case.op.backward(*dy, saved, *params, *joint, **case.scalars)
    dx = case.op.backward(*dy, saved, *params, *[None] * len(params), **case.scalars)
    assert case.op.backward_dw(*dy, saved, *params, *apart, **case.scalars) is None
    flat = [torch.utils._pytree.tree_leaves(x) for x in ((joint_dx, joint), (dx, apart))]
    return [x for x in flat[0] if x is not None], [x for x in flat[1] if x is not None]


@pytest.mark.parametrize(("dtype", "accumulate"), [("float32", True), ("bfloat16", False)])
@pytest.mark.parametrize("name", SETS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")  # numpy, in the interpreter
def test_bits_of_the_joint_backward(name: str, dtype: str, accumulate: bool):
    ops, device = build(name), "cuda" if ON_GPU and "triton" in name else "cpu"
    chosen = ops if accumulate else ops.non_accumulating
    if chosen is None:
        pytest.skip("it has no non-accumulating variant")
    if name == "triton-fp8" and (dtype == "float32" or (ON_GPU and torch.cuda.get_device_capability() < (8, 9))):
        pytest.skip("fp8 kernels read bfloat16, and need a GPU that has fp8")
    seen = 0
    for case in cases(chosen, device):
        joint, apart = joint_and_apart(case, getattr(torch, dtype))
        assert len(joint) == len(apart) > 1, case.name
        for a, b in zip(joint, apart, strict=True):
            assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), case.name
        seen += 1
    assert seen >= 7  # linear, and ffn_down of every kind


@pytest.mark.parametrize("case", [case for case in CASES if case.op.backward_dw], ids=attrgetter("name"))
def test_every_reference_op_that_has_it(case: OpCase):
    joint, apart = joint_and_apart(case, torch.float64)
    assert all(torch.equal(a, b) for a, b in zip(joint, apart, strict=True))


@pytest.mark.parametrize("name", SETS)
def test_which_ops_have_it(name: str):
    ops = build(name)
    for each in (ops, ops.non_accumulating or ops):
        assert each.linear.backward_dw is not None
        assert all(op.backward_dw is not None for op in each.ffn_down.values())


@pytest.mark.parametrize("name", SETS)
def test_metadata_of_the_reference_ops(name: str):
    """A kernel set has the names of the ops that it replaces."""
    ops, expected = build(name), metadata(REFERENCE)
    assert metadata(ops) == metadata(ops.non_accumulating or ops) == expected
    assert ("attention", ("o",), ("dq", "dk", "dv")) in expected


def metadata(ops: OpSet) -> set[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    found = set()

    def look(field: str, op: Op) -> Op:
        found.add((field, op.outputs, op.grads))
        return op

    ops.map(look)
    return found
