"""The judge of the optimizer's passes: a right kernel passes, wrong ones are seen."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tapeless.ops.op import OpSet
from tapeless.ops.reference import REFERENCE
from tapeless.optim.clip import grad_norm
from tapeless.verify.kernel_update import update_findings


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor, copy: Tensor, pieces: Tensor, numbers: Tensor, scale: Tensor) -> None:
    """Plain torch, piece by piece."""
    shrink, rate, one_minus_beta1, beta2, one_minus_beta2, correction, eps = numbers.tolist()
    if scale.isnan():
        return
    for first, last, decays in pieces.tolist():
        at = slice(first, last)
        d = g[at] * scale
        m[at] = m[at] + one_minus_beta1 * (d - m[at])
        v[at] = beta2 * v[at] + one_minus_beta2 * d * d
        p[at] = p[at] * (shrink if decays else 1) - rate * m[at] / (v[at].sqrt() * correction + eps)
    copy.copy_(p)


RIGHT = replace(
    REFERENCE, adam_update=adam, grad_norm=lambda x: grad_norm(x).double(), capture=lambda run: (run(), "not captured")
)


def wrong(change: Callable[[list[Any]], None]) -> OpSet:
    def changed(*args: Any) -> None:
        arguments = list(args)
        change(arguments)
        adam(*arguments)

    return replace(RIGHT, adam_update=changed)


def everything_decays(arguments: list[Any]) -> None:
    arguments[5] = arguments[5].clone()
    arguments[5][:, 2] = 1


def no_correction(arguments: list[Any]) -> None:
    arguments[6] = arguments[6].clone()
    arguments[6][5] = 1


def a_rounded_beta(arguments: list[Any]) -> None:
    arguments[6] = arguments[6].clone()
    arguments[6][4] = 1 - arguments[6][3]


def no_clipping(arguments: list[Any]) -> None:
    arguments[7] = torch.where(arguments[7].isnan(), torch.nan, 1.0)


def a_piece_is_left_out(arguments: list[Any]) -> None:
    arguments[5] = arguments[5][:-1]


def a_broken_step_is_taken(arguments: list[Any]) -> None:
    arguments[7] = arguments[7].nan_to_num(1.0)


def test_a_right_set_passes():
    findings = list(update_findings(RIGHT, "cpu"))
    assert len(findings) == 11
    assert [str(finding) for finding in findings if not finding.ok] == []


WRONG = [everything_decays, no_correction, a_rounded_beta, no_clipping, a_piece_is_left_out, a_broken_step_is_taken]


@pytest.mark.parametrize("change", WRONG)
def test_a_wrong_one_is_seen(change: Callable[[list[Any]], None]):
    assert any(not finding.ok for finding in update_findings(wrong(change), "cpu"))


def test_a_wrong_norm_is_seen():
    off = replace(RIGHT, grad_norm=lambda x: grad_norm(x).double() * 1.001)
    assert any(not finding.ok for finding in update_findings(off, "cpu"))
    blind = replace(RIGHT, grad_norm=lambda x: grad_norm(x.nan_to_num()).double())
    assert any(not finding.ok for finding in update_findings(blind, "cpu"))
