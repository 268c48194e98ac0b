"""One step: however a batch is cut, its gradient is the mean over valid tokens; a step that is not finite updates nothing."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tapeless.config import ModelConfig, SimpleLMConfig
from tapeless.errors import InputError, NonFiniteError
from tapeless.model.build import AnyModel, build_model
from tapeless.optim import SGD, AdamW
from tapeless.training.step import accumulate_gradients, train_step

V, B, T = 11, 6, 5
MODEL = ModelConfig(vocab_size=V, hidden_dim=8, num_layers=2, num_heads=2, intermediate_dim=12, max_seq_len=T)
MODELS = {
    "llama": MODEL,
    "dropout": ModelConfig(
        vocab_size=V, hidden_dim=8, num_layers=1, num_heads=2, intermediate_dim=12, max_seq_len=T, dropout=0.3
    ),
    "simplelm": SimpleLMConfig(vocab_size=V, hidden_dim=8, intermediate_dim=12),
}


def batch() -> tuple[Tensor, Tensor]:
    """Rows with 5, 4, 1, 0, 3 and 5 valid targets: every way to cut it gives parts of unequal weight."""
    tokens, targets = torch.randint(0, V, (2, B, T), generator=torch.Generator().manual_seed(1))
    for row, valid in enumerate((5, 4, 1, 0, 3, 5)):
        targets[row, valid:] = -100
    return tokens, targets


def gradients(model: AnyModel, grad_accum: int) -> tuple[float, Tensor]:
    loss = accumulate_gradients(model, *batch(), grad_accum=grad_accum, step=3, first_sample=40)
    return loss, model.store.flat_grads.clone()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("grad_accum", [2, 3])
def test_micro_batches_of_unequal_weight_are_one_batch(name: str, grad_accum: int):
    model = build_model(MODELS[name], dtype="float64")
    loss, grads = gradients(model, 1)
    cut_loss, cut_grads = gradients(model, grad_accum)
    assert cut_loss == pytest.approx(loss, rel=1e-13)
    assert (cut_grads - grads).norm() < 1e-13 * grads.norm()


def test_the_mean_of_means_would_have_been_seen():
    """The classic mistake, made here on purpose, is far outside of the tolerance above."""
    model = build_model(MODEL, dtype="float64")
    _, grads = gradients(model, 1)
    model.zero_grads()
    for x, y in zip(*(x.split(3) for x in batch()), strict=True):
        model.forward(x, y)
        model.backward()
    means = model.store.flat_grads / 2
    assert (means - grads).norm() > 0.01 * grads.norm()


def test_a_micro_batch_without_a_valid_target_adds_nothing():
    model = build_model(MODEL, dtype="float64")
    tokens, targets = batch()
    targets[3:] = -100
    whole = accumulate_gradients(model, tokens, targets, grad_accum=2, step=0, first_sample=0)
    grads = model.store.flat_grads.clone()
    alone = accumulate_gradients(model, tokens[:3], targets[:3], grad_accum=1, step=0, first_sample=0)
    assert whole == pytest.approx(alone, rel=1e-13)
    assert (model.store.flat_grads - grads).norm() < 1e-13 * grads.norm()


def test_a_batch_that_cannot_be_cut_is_an_error():
    with pytest.raises(InputError, match="6 rows cannot be split into 4 equal micro-batches"):
        gradients(build_model(MODEL), 4)


def test_the_update_is_the_clipped_gradient_times_the_rate_and_the_norm_told_is_the_true_one():
    model = build_model(MODEL, dtype="float64")
    _, grads = gradients(model, 1)
    before = model.store.flat.clone()
    limit = float(grads.norm()) / 3
    optimizer = SGD(model.params, model.grads, lr=123.0)
    result = train_step(model, optimizer, *batch(), lr=0.5, grad_clip=limit, grad_accum=3, step=3, first_sample=40)
    assert result.grad_norm == pytest.approx(3 * limit, rel=1e-12)
    assert (model.store.flat - (before - 0.5 * grads / 3)).norm() < 1e-12 * before.norm()


def train_once(model: AnyModel, optimizer: AdamW) -> None:
    train_step(model, optimizer, *batch(), lr=1e-2, grad_clip=1.0, grad_accum=2, step=7, first_sample=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_under_a_finite_loss_updates_nothing(bad: float, monkeypatch: pytest.MonkeyPatch):
    model = build_model(MODEL)
    optimizer = AdamW(model.params, model.grads)
    train_once(model, optimizer)
    before = [model.store.flat.clone(), *(x.clone() for x in optimizer.state.values())]
    healthy = model.forward_backward

    def spoilt(*args: Any, **options: Any) -> Tensor:
        loss = healthy(*args, **options)
        model.store.flat_grads[5] = bad
        return loss

    monkeypatch.setattr(model, "forward_backward", spoilt)
    with pytest.raises(NonFiniteError, match=rf"step 8: loss \d\.\d+, gradient norm {bad}; nothing was updated"):
        train_once(model, optimizer)
    assert optimizer.t == 1
    for old, new in zip(before, [model.store.flat, *optimizer.state.values()], strict=True):
        assert torch.equal(old, new)


def test_a_loss_that_is_no_number_updates_nothing(monkeypatch: pytest.MonkeyPatch):
    model = build_model(MODEL)
    optimizer = AdamW(model.params, model.grads)
    before, healthy = model.store.flat.clone(), model.forward_backward
    monkeypatch.setattr(model, "forward_backward", lambda *args, **options: healthy(*args, **options) * math.nan)
    with pytest.raises(NonFiniteError, match="step 8: loss nan"):
        train_once(model, optimizer)
    assert torch.equal(model.store.flat, before)
    assert optimizer.t == 0
