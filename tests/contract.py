"""What every op must do, whatever it computes. A kernel passes the same suite as the op it replaces:

check_behaviour     the promises of ops/op.py, in the dtype that the op runs in
check_mathematics   values and gradients by every oracle, in float64: what only plain torch can do
check_precision     float32 within its bound; bfloat16 no worse than a small multiple of the reference op's own error

check_op            all three, for the reference
check_kernel        what a kernel can be asked: behaviour and precision in the dtypes it has, and odd sizes"""

from collections.abc import Iterable
from operator import attrgetter

import pytest
import torch

from tapeless.verify.cases import CASES, OpCase
from tapeless.verify.finding import Finding, distance
from tapeless.verify.kernel_ops import at_one_position, at_other_sizes, beside_the_reference
from tapeless.verify.op_levels import against_float64, check_case, in_narrow
from tapeless.verify.oracles import norm
from tapeless.verify.promises import promises
from tapeless.verify.tolerances import AUTOGRAD, ROUNDING_FLOOR


def each_case(family: str) -> pytest.MarkDecorator:
    """Run a test for every case of one file of ops/."""
    chosen = [case for case in CASES if case.family == family]
    return pytest.mark.parametrize("case", chosen, ids=attrgetter("name"))


def check_op(case: OpCase) -> None:
    check_behaviour(case)
    check_mathematics(case)
    check_precision(case)


def check_kernel(case: OpCase, dtypes: Iterable[str] = ("float32", "bfloat16")) -> None:
    """case: one of cases_of(the set), with the set's own op in it."""
    for dtype in dtypes:
        check_behaviour(case, dtype)
    check_precision(case, dtypes)
    others = list(at_other_sizes(case))
    if others:  # a case that is about its own sizes has none
        check_within(others)


def check_within(findings: Iterable[Finding]) -> None:
    found = list(findings)
    assert found, "nothing was looked at"
    failed = [str(finding) for finding in found if not finding.ok]
    assert not failed, "\n".join(failed)


def check_behaviour(case: OpCase, dtype: str = "float64") -> None:
    check_within(promises(case, dtype))


def check_mathematics(case: OpCase) -> None:
    check_within(check_case(case))
    check_one_position(case)


def check_precision(case: OpCase, dtypes: Iterable[str] = ("float32", "bfloat16")) -> None:
    check_within(in_narrow(case, dtypes))
    check_within(at_one_position(case))
    if "bfloat16" in dtypes:
        check_within(beside_the_reference(case))


def check_one_position(case: OpCase) -> None:
    """T = 1. What is zero there by identity has no relative error; it must be rounding beside the other gradients."""
    case = case.at(T=1)
    found = against_float64(case, torch.float64)
    whole = norm({name: truth for name, (_, truth) in found.items() if name not in case.outputs})
    for name, (out, truth) in found.items():
        if case.is_zero(name):
            assert float(out.abs().max()) <= ROUNDING_FLOOR * whole, f"{case.name} {name} is not zero where T=1"
        else:
            assert distance(out, truth).largest <= AUTOGRAD, f"{case.name} {name} where T=1"
