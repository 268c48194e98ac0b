"""L0 and L1 pass on the ops as they are, say where an error is, and can be asked for one op."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tapeless.errors import ConfigError
from tapeless.ops.op import Op
from tapeless.verify.cases import CASES, cases
from tapeless.verify.op_levels import check_case, level_0, level_1

BY_NAME = {case.name: case for case in CASES}


def test_level_0_passes_and_judges_every_linear_piece():
    findings = list(level_0())
    assert [str(finding) for finding in findings if not finding.ok] == []
    assert {finding.check.partition("[")[0] for finding in findings} == {
        *("embed", "positions", "linear", "lora", "matmul", "broadcast", "ffn_down", "dropout", "rope", "qkv_rope"),
        "attention",
    }


def test_level_1_passes():
    assert [str(finding) for finding in level_1() if not finding.ok] == []


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ("softcap", {"softcap"}),
        ("gqa", {"attention[gqa]"}),
        ("attention[mqa]", {"attention[mqa]"}),
        ("broadcast", {"broadcast[add]", "broadcast[mul]"}),
    ],
)
def test_one_op_alone(only: str, expected: set[str]):
    assert {finding.check for finding in level_1(only)} == expected


def test_unknown_op_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'attention'"):
        cases("atention")


def test_names_are_unique():
    assert len(BY_NAME) == len(CASES)


def test_the_worst_element_is_named():
    case = BY_NAME["softmax"]

    def backward(dy: Tensor, saved: tuple[Tensor]) -> Tensor:
        dx = case.op.backward(dy, saved)
        dx[1, 2, 5] += 1.0
        return dx

    failed = [finding for finding in check_case(replace(case, op=Op(case.op.forward, backward))) if not finding.ok]
    assert {finding.oracle for finding in failed} == {"autograd reference", "complex step", "central difference", "float32"}
    assert {finding.where for finding in failed} == {(1, 2, 5), None}


def test_a_gradient_that_vanishes_beside_the_others_is_underpowered():
    """With one position a query has nothing to choose from: dq and dk are zero, and comparing zeros proves nothing."""
    case = BY_NAME["attention[gqa]"]
    findings = [finding for finding in check_case(case.at(T=1)) if finding.oracle == "underpowered"]
    assert {finding.tensor for finding in findings} == {"dq", "dk"}
    assert not any(finding.ok for finding in findings)


def test_fixtures_are_the_same_numbers_in_every_dtype():
    for case in CASES:
        wide, narrow = case.inputs(), case.inputs(dtype=torch.float32)
        assert all(torch.equal(narrow[name], x.float() if x.is_floating_point() else x) for name, x in wide.items())
