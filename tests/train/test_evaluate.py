"""Evaluation: the mean over valid targets by the forward of training, on however many pieces, and nothing left behind."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tapeless.config import ModelConfig, SimpleLMConfig
from tapeless.data.loader import ValidationSet
from tapeless.errors import InputError, NonFiniteError
from tapeless.model.build import build_model
from tapeless.training import evaluate as module
from tapeless.training.evaluate import accuracy, evaluate

V, N, T = 13, 9, 6
MODEL = ModelConfig(vocab_size=V, hidden_dim=8, num_layers=2, num_heads=2, intermediate_dim=12, max_seq_len=T)
MODELS = {"llama": MODEL, "simplelm": SimpleLMConfig(vocab_size=V, hidden_dim=8, intermediate_dim=12)}


def windows() -> tuple[Tensor, Tensor]:
    tokens, targets = torch.randint(0, V, (2, N, T), generator=torch.Generator().manual_seed(1))
    targets[-1, 2:] = -100  # the last window is filled up
    targets[3] = -100
    return tokens, targets


def validation(tokens: Tensor, targets: Tensor) -> ValidationSet:  # (N, T)
    return ValidationSet(lambda which: (tokens[which], targets[which]), N, T)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", [1, 2, 4, 100])
def test_the_mean_over_valid_targets_by_another_formula(name: str, rows: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "TOKENS", rows * T)
    model = build_model(MODELS[name], dtype="float64")
    tokens, targets = windows()
    found = evaluate(model, validation(tokens, targets), bytes_per_token=1.5)
    assert found is not None
    p = torch.softmax(model.logits(tokens), -1).flatten(0, 1)
    valid = targets.flatten() >= 0
    expected = -p[valid].gather(1, targets.flatten()[valid, None]).log().mean().item()
    assert found.val_loss == pytest.approx(expected, rel=1e-12)
    assert found.perplexity == pytest.approx(math.exp(expected), rel=1e-12)
    assert found.bits_per_byte == pytest.approx(expected / math.log(2) / 1.5, rel=1e-12)


def test_nothing_is_dropped_out_and_nothing_changes():
    tokens, targets = windows()
    model, plain = (build_model(replace(MODEL, dropout=p)) for p in (0.5, 0.0))
    model.forward(tokens, targets, step=1)
    model.backward()
    params, grads = model.store.flat.clone(), model.store.flat_grads.clone()
    assert evaluate(model, validation(tokens, targets), 1.0) == evaluate(plain, validation(tokens, targets), 1.0)
    assert torch.equal(model.store.flat, params)
    assert torch.equal(model.store.flat_grads, grads)


def test_a_stop_is_asked_for_before_every_piece(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "TOKENS", 2 * T)
    model = build_model(MODEL)
    asked: list[int] = []

    def stopped() -> bool:
        asked.append(1)
        return len(asked) == 3

    assert evaluate(model, validation(*windows()), 1.0, stopped=stopped) is None
    assert len(asked) == 3
    assert evaluate(model, validation(*windows()), 1.0, stopped=lambda: False) is not None


def test_a_hopeless_loss_has_a_perplexity():
    model = build_model(replace(MODEL, tie_embeddings=True), dtype="float64")
    model.params["embed.w"][:] *= 1e5
    found = evaluate(model, validation(*windows()), 1.0)
    assert found is not None
    assert found.val_loss > 700
    assert found.perplexity == math.inf


@pytest.mark.parametrize("rows", [2, 100])
def test_accuracy_is_the_share_of_likeliest_predictions(rows: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "TOKENS", rows * T)
    model = build_model(MODEL)
    tokens, _ = windows()
    likeliest = model.logits(tokens).argmax(-1)
    assert accuracy(model, validation(tokens, likeliest)) == (1.0, N * T)
    assert accuracy(model, validation(tokens, (likeliest + 1) % V)) == (0.0, N * T)
    half = torch.where(torch.arange(T) % 2 == 0, likeliest, (likeliest + 1) % V)
    half[2] = -100
    assert accuracy(model, validation(tokens, half)) == (0.5, (N - 1) * T)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sum_has_the_bits_of_losses_read_one_by_one(dtype: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "TOKENS", 2 * T)
    model, (tokens, targets) = build_model(MODEL, dtype=dtype), windows()
    pieces = zip(tokens.split(2), targets.split(2), strict=True)
    expected = sum(float(model.loss(x, y, num_targets=1)) for x, y in pieces) / int((targets >= 0).sum())
    for rows in (0, 4):  # a GPU alone gets larger batches
        found = evaluate(model, validation(tokens, targets), 1.0, rows=rows)
        assert found is not None
        assert found.val_loss == expected


def test_only_the_sum_is_read(monkeypatch: pytest.MonkeyPatch):
    """A read of each loss would wait for a GPU each time."""
    model, asked = build_model(MODEL), []
    monkeypatch.setattr(module, "TOKENS", 2 * T)
    loss = model.loss

    def seen(*batch: Tensor, check: bool = True, **options: int) -> Tensor:
        asked.append(check)
        return loss(*batch, check=check, **options)

    monkeypatch.setattr(model, "loss", seen)
    assert evaluate(model, validation(*windows()), 1.0) is not None
    assert asked == [False] * 5


@pytest.mark.parametrize(("which", "bad"), [(0, V), (1, -5)])
def test_a_bad_id_is_named(which: int, bad: int):
    data = windows()
    data[which][2, 3] = bad
    with pytest.raises(InputError, match=r"\[2, 3\]"):
        evaluate(build_model(MODEL), validation(*data), 1.0)


def test_a_broken_parameter_is_named():
    model = build_model(MODEL)
    model.params["blocks.1.ffn.w_down"][3, 4] = torch.nan
    with pytest.raises(NonFiniteError, match=r"blocks.1.ffn.w_down.*\[3, 4\]"):
        evaluate(model, validation(*windows()), 1.0)
