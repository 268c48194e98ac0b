"""Adam and AdamW, step by step against torch.optim."""

import pytest
import torch
from optim_fixtures import STEPS, draw_gradients, movement_errors, small_model

import tapeless
from tapeless.errors import ConfigError
from tapeless.optim import Adam, AdamW
from tapeless.verify.tolerances import OPTIMIZER

THEIRS = {AdamW: torch.optim.AdamW, Adam: torch.optim.Adam}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("beta1", "beta2", "eps"), [(0.9, 0.95, 1e-8), (0.8, 0.999, 1e-3), (0.0, 0.5, 1e-8)])
@pytest.mark.parametrize("kind", THEIRS)
def test_every_step_is_that_of_torch(kind: type[Adam], beta1: float, beta2: float, eps: float, weight_decay: float):
    model = small_model()
    ours = kind(model.params, model.grads, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
    errors = movement_errors(model, ours, THEIRS[kind], weight_decay, betas=(beta1, beta2), eps=eps)
    assert {name: error for name, error in errors.items() if error > OPTIMIZER} == {}
    assert ours.t == STEPS


def test_the_first_step_is_lr_in_the_direction_of_the_sign():
    model = small_model()
    draw_gradients(model, 0)
    before = model.store.flat.clone()
    AdamW(model.params, model.grads, lr=0.5, eps=1e-30, weight_decay=0.0).step()
    assert (before - model.store.flat).allclose(0.5 * model.store.flat_grads.sign(), rtol=1e-12)


def test_decay_of_adamw_is_apart_from_the_gradient_and_that_of_adam_is_not():
    """Without gradients AdamW shrinks every matrix by lr wd, and Adam takes its normalized step of lr."""
    for kind, expected in ((AdamW, lambda w: w * (1 - 0.5 * 0.1)), (Adam, lambda w: w - 0.5 * w.sign())):
        model = small_model()
        start = {name: w.clone() for name, w in model.params.items()}
        kind(model.params, model.grads, lr=0.5, eps=1e-30, weight_decay=0.1).step()
        for name, w in model.params.items():
            assert w.allclose(expected(start[name]) if w.dim() > 1 else start[name], rtol=1e-12), (kind, name)


def test_eps_of_zero_is_refused():
    model = small_model()
    with pytest.raises(ConfigError, match="eps must be above 0, got 0"):
        AdamW(model.params, model.grads, eps=0.0)


def test_reached_from_the_package_alone():
    """As a user writes it: import tapeless, and nothing else."""
    config = tapeless.ModelConfig(vocab_size=11, hidden_dim=6, num_layers=1, num_heads=1, intermediate_dim=5)
    model = tapeless.Transformer(config, dtype="float64")
    optimizer = tapeless.optim.AdamW(model.params, model.grads, lr=1e-2)
    tokens = torch.arange(10).view(2, 5)
    losses = []
    for _ in range(5):
        model.zero_grads()
        losses.append(float(model.forward(tokens, tokens)))
        model.backward()
        optimizer.step()
    assert losses == sorted(losses, reverse=True)
