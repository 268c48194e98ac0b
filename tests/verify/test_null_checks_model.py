"""The judges of whole models are judged: each is handed gradients that are wrong, and must say so for every tensor."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tapeless.verify.finding import Finding
from tapeless.verify.fixtures import MODEL_CASES, ModelCase, T, build, data_of, gradients, move_off_init, zero_by_identity
from tapeless.verify.model_judges import by_autograd, by_complex_step, by_differences, by_slope, compared, largest_gap

Grads = dict[str, Tensor]
CASES = [pytest.param(case, id=case.name) for case in MODEL_CASES]


def swapped(g: Tensor) -> Tensor:
    """The largest row and the smallest in each other's place."""
    sizes = g.reshape(g.shape[0], -1).norm(dim=1)
    wrong, i, j = g.clone(), int(sizes.argmax()), int(sizes.argmin())
    wrong[[i, j]] = g[[j, i]]
    return wrong


def of_another_seed(case: ModelCase) -> Grads:
    model = build(case)
    move_off_init(model, seed=2)
    return gradients(model, data_of(case))


WRONG: dict[str, Callable[[ModelCase, Grads], Grads]] = {
    "zero": lambda case, grads: {name: torch.zeros_like(g) for name, g in grads.items()},
    "one percent too large": lambda case, grads: {name: 1.01 * g for name, g in grads.items()},
    "negative": lambda case, grads: {name: -g for name, g in grads.items()},
    "two rows swapped": lambda case, grads: {name: swapped(g) for name, g in grads.items()},
    "of another seed": lambda case, grads: of_another_seed(case),
}


def wrong_gradients(case: ModelCase, kind: str) -> Grads:
    return WRONG[kind](case, gradients(build(case), data_of(case)))


def passed(findings: list[Finding], case: ModelCase) -> list[str]:
    """What was let through, but for the gradients that are zero whatever one multiplies them with."""
    zeros = zero_by_identity(case.config, T)
    judged = [f for f in findings if f.oracle != "underpowered" and f.tensor not in zeros]
    assert judged
    return [str(finding) for finding in judged if finding.ok]


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("case", CASES)
def test_autograd_rejects_every_tensor(case: ModelCase, kind: str):
    assert passed(list(by_autograd(case, data_of(case), wrong_gradients(case, kind))), case) == []


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("case", CASES)
def test_the_complex_step_rejects_every_tensor(case: ModelCase, kind: str):
    assert passed(list(by_complex_step(case, data_of(case), wrong_gradients(case, kind))), case) == []


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("case", CASES)
def test_differences_and_slope_reject_the_whole(case: ModelCase, kind: str):
    data, claimed = data_of(case), wrong_gradients(case, kind)
    differences = list(by_differences(case, data, claimed))
    if kind == "two rows swapped":  # a direction along one row of each tensor may miss the two
        differences = [finding for finding in differences if finding.tensor != "along slice"]
    assert passed(differences, case) == []
    assert passed(list(by_slope(case, data, claimed)), case) == []


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_hugging_face_rejects_every_tensor(kind: str, dtype: str):
    pytest.importorskip("transformers")
    from tapeless.verify.hf_levels import by_hugging_face, family_cases, hf_model, run_hf, shifted_batch

    for case in family_cases():
        ours, data = build(case.case, dtype), shifted_batch()
        theirs = run_hf(hf_model(case.family, case.config, ours.params, dtype), data)
        del theirs["logits"], theirs["loss"]
        claimed = gradients(ours, data)
        assert all(finding.ok for finding in by_hugging_face(case, dtype, claimed, theirs))
        wrong = {name: g.to(ours.params[name].dtype) for name, g in WRONG[kind](case.case, claimed).items()}
        assert passed(list(by_hugging_face(case, dtype, wrong, theirs)), case.case) == []


def test_a_gradient_that_is_zero_by_identity_may_not_be_anything_else():
    case = next(case for case in MODEL_CASES if case.name == "gpt2")
    grads = gradients(build(case), data_of(case))
    grads["blocks.1.attn.bk"] += 1e-12
    failed = [finding.tensor for finding in by_autograd(case, data_of(case), grads) if not finding.ok]
    assert failed == ["blocks.1.attn.bk"]


def test_a_tensor_that_is_too_weak_fails_as_underpowered():
    strong, weak = torch.ones(3), torch.full((3,), 1e-7)
    findings = list(compared("L2", "x", "oracle", {"a": strong, "b": weak}, {"a": strong, "b": weak}, 1e-10, zeros=set()))
    assert [(f.oracle, f.tensor) for f in findings if not f.ok] == [("underpowered", "b")]


def test_one_bit_is_not_bit_equal():
    x = torch.ones(3)
    assert largest_gap("L5", "x", "equal", {"a": x}, {"a": x}).ok
    y = x.clone()
    y[1] += torch.finfo(x.dtype).eps
    assert not largest_gap("L5", "x", "equal", {"a": y}, {"a": x}).ok
    y[1] = torch.nan
    assert not largest_gap("L5", "x", "equal", {"a": y}, {"a": x}).ok
