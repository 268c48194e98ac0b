"""One optimizer here and its counterpart in torch.optim, stepped side by side on the same random gradients."""

from typing import Any

import torch
from torch import Tensor

from tapeless.config import ModelConfig
from tapeless.model.transformer import Transformer
from tapeless.optim.flat import FlatOptimizer

STEPS = 25


def small_model(dtype: str = "float64") -> Transformer:
    """Matrices, norms and biases, fused neighbours, and gaps between them."""
    config = ModelConfig(
        vocab_size=11, hidden_dim=6, num_layers=1, num_heads=1, intermediate_dim=5, norm="layer", norm_bias=True, ffn_bias=True
    )
    return Transformer(config, seed=0, dtype=dtype)


def lr_at(step: int) -> float:
    return 1e-2 * (1 + step % 7) / (1 + step % 3)


def draw_gradients(model: Transformer, step: int) -> None:
    """Of very different sizes, one tensor without any: what a rare token sees."""
    generator = torch.Generator().manual_seed(step)
    for i, (name, g) in enumerate(model.grads.items()):
        size = 0.0 if name == "embed.w" and step % 2 else 10.0 ** (i % 4 - 1)
        g.copy_(size * torch.randn(g.shape, generator=generator, dtype=g.dtype))


def gaps(model: Transformer, flat: Tensor) -> Tensor:
    """The elements that belong to no parameter."""
    free = torch.ones(len(flat), dtype=torch.bool)
    for offset, size in model.store.layout.spans.values():
        free[offset : offset + size] = False
    assert free.any()
    return flat[free]


def draw_for_both(model: Transformer, theirs: dict[str, Tensor], step: int) -> None:
    """The same gradients for the model and for copies of its parameters."""
    draw_gradients(model, step)
    for name, w in theirs.items():
        w.grad = model.grads[name].clone()


def step_both(
    model: Transformer, ours: FlatOptimizer, theirs: dict[str, Tensor], judge: torch.optim.Optimizer, step: int
) -> None:
    """One step of each, with the same gradients and at the same rate."""
    draw_for_both(model, theirs, step)
    for group in judge.param_groups:
        group["lr"] = lr_at(step)
    ours.lr = lr_at(step)
    ours.step()
    judge.step()


def movement_errors(
    model: Transformer, ours: FlatOptimizer, kind: type[torch.optim.Optimizer], weight_decay: float, **options: Any
) -> dict[str, float]:
    """After every step, the worst gap of each tensor beside the way it has gone by then."""
    start = {name: w.clone() for name, w in model.params.items()}
    theirs = {name: w.clone() for name, w in model.params.items()}
    norms_and_biases = [name for name in theirs if "norm" in name or name.split(".")[-1].startswith("b")]
    groups = [
        {"params": [w for name, w in theirs.items() if name not in norms_and_biases], "weight_decay": weight_decay},
        {"params": [theirs[name] for name in norms_and_biases], "weight_decay": 0.0},
    ]
    judge = kind(groups, **options)
    worst = dict.fromkeys(theirs, 0.0)
    for step in range(STEPS):
        step_both(model, ours, theirs, judge, step)
        for name, w in theirs.items():
            assert w.grad is not None
            assert model.grads[name].equal(w.grad)  # as it was drawn
            moved = float((w - start[name]).norm())
            worst[name] = max(worst[name], float((model.params[name] - w).norm()) / moved)
    for flat in (model.store.flat, model.store.flat_grads, *ours.state.values()):
        assert not gaps(model, flat).any()
    return worst
