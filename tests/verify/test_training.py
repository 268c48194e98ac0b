"""L4 is judged: a run that went elsewhere, or told other losses, must fail; and its recipes must be worth running."""

from collections.abc import Callable

import pytest
import torch

from levels.training import CASES, RECIPES, Course, Recipe, batch_at, by_torch, our_course, their_course
from tapeless.verify.finding import Finding
from tapeless.verify.fixtures import build, values
from tapeless.verify.oracles import Point

LONG = RECIPES[-1]
SHORT = [pytest.param(r, id=f"{r.config.optimizer}-{r.case}-{r.dtype}") for r in RECIPES if r.steps < 100]
IN_WEIGHTS = [p for p in SHORT if p.values[0].dtype != "bfloat16"]


def swapped(movement: torch.Tensor) -> torch.Tensor:
    sizes = movement.reshape(movement.shape[0], -1).norm(dim=1)
    wrong, i, j = movement.clone(), int(sizes.argmax()), int(sizes.argmin())
    wrong[[i, j]] = movement[[j, i]]
    return wrong


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "stayed": torch.zeros_like,
    "one percent too far": lambda movement: 1.01 * movement,
    "the other way": lambda movement: -movement,
    "two rows swapped": swapped,
}


def wrong_course(recipe: Recipe, kind: str) -> Course:
    start, truth = values(build(CASES[recipe.case])), their_course(recipe)
    return truth._replace(weights={name: start[name] + WRONG[kind](w - start[name]) for name, w in truth.weights.items()})


def judged(found: list[Finding], start: Point) -> dict[str, Finding]:
    return {finding.tensor: finding for finding in found if finding.tensor in start and finding.oracle == "torch.optim"}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("recipe", IN_WEIGHTS)
def test_every_tensor_that_went_elsewhere_is_seen(recipe: Recipe, kind: str):
    """All but the key bias of gpt2, which does not move by identity."""
    found = judged(list(by_torch(recipe, wrong_course(recipe, kind))), values(build(CASES[recipe.case])))
    assert {name for name, finding in found.items() if finding.ok} <= {"blocks.0.attn.bk", "blocks.1.attn.bk"}
    assert len(found) > 4


@pytest.mark.parametrize("recipe", [p for p in SHORT if p.values[0].config.ema_decay])
@pytest.mark.parametrize("kind", ["the weights themselves", "one percent too far", "none"])
def test_an_average_of_the_weights_that_is_none_is_seen(recipe: Recipe, kind: str):
    truth = their_course(recipe)
    assert truth.average is not None
    wrong = {
        "the weights themselves": truth.weights,
        "one percent too far": {name: 1.01 * w for name, w in truth.average.items()},
        "none": None,
    }
    failed = [finding for finding in by_torch(recipe, truth._replace(average=wrong[kind])) if not finding.ok]
    assert {finding.oracle for finding in failed} == {"average of all weights"}
    assert {finding.tensor for finding in failed} == build(CASES[recipe.case]).grads.keys()


@pytest.mark.parametrize("recipe", SHORT)
def test_one_loss_that_is_two_percent_off_is_seen(recipe: Recipe):
    truth = their_course(recipe)
    assert all(finding.ok for finding in by_torch(recipe, truth))
    losses = [1.02 * loss if step == 5 else loss for step, loss in enumerate(truth.losses)]
    failed = [finding for finding in by_torch(recipe, truth._replace(losses=losses)) if not finding.ok]
    assert [(finding.tensor, finding.where) for finding in failed] == [("loss", (5,))]


@pytest.mark.parametrize("recipe", IN_WEIGHTS)
def test_a_norm_told_after_clipping_is_seen(recipe: Recipe):
    truth = their_course(recipe)
    clipped = [min(size, recipe.config.grad_clip) for size in truth.norms]
    failed = [finding for finding in by_torch(recipe, truth._replace(norms=clipped)) if not finding.ok]
    assert [finding.tensor for finding in failed] == ["gradient norm"]


def test_a_recipe_that_never_clips_is_underpowered():
    recipe = SHORT[0].values[0]
    lax = recipe._replace(options={**recipe.options, "grad_clip": 1e3})
    failed = [finding for finding in by_torch(lax, our_course(lax)) if not finding.ok]
    assert [finding.oracle for finding in failed] == ["underpowered"]


def test_batches_change_and_their_micro_batches_are_unequal():
    counts = [[int((part != -100).sum()) for part in batch_at(step)[1].chunk(2)] for step in range(12)]
    assert all(first != second for first, second in counts)
    assert any(second == 0 for _, second in counts)
    assert len({batch_at(step)[0].sum().item() for step in range(12)}) > 6


def test_the_long_run_is_a_hundred_steps_with_a_resume_and_every_optimizer_is_there():
    assert (LONG.steps, LONG.resume_at, LONG.dtype) == (100, 50, "float64")
    assert {recipe.config.optimizer for recipe in RECIPES if recipe.dtype == "float64"} == {"adamw", "adam", "sgd", "muon"}
    assert {recipe.dtype for recipe in RECIPES if recipe.steps >= 20} == {"float64", "float32", "bfloat16"}


@pytest.mark.parametrize("recipe", [p for p in SHORT if p.values[0].case.startswith(("lora", "frozen"))])
def test_a_frozen_tensor_that_moved_is_seen(recipe: Recipe):
    truth, trained = their_course(recipe), build(CASES[recipe.case]).grads
    moved = truth._replace(weights={name: w if name in trained else w + 1e-12 for name, w in truth.weights.items()})
    seen = {finding.tensor for finding in by_torch(recipe, moved) if not finding.ok and finding.oracle == "frozen"}
    assert seen == truth.weights.keys() - trained.keys()
