"""L6 for what comes after the gradient: clipping, and each optimizer against its own definition.

An optimizer keeps running averages, one recursion a step. By definition they are weighted means over all gradients so far,
    m / (1 - b1^t) = sum_i b1^(t-i) g_i / sum_i b1^(t-i)          the same with b2 and g_i^2 for v;   u = sum_i mu^(t-i) d_i
and a mean needs no correction for its first steps. So the history is kept here and summed anew at every step. Without
gradients only weight decay moves anything, and nothing but matrices."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tapeless.config import TrainConfig
from tapeless.model.build import AnyModel
from tapeless.optim import make_optimizer
from tapeless.optim.clip import clip_grads
from tapeless.verify.finding import Finding, distance
from tapeless.verify.fixtures import MODEL_CASES, build, values
from tapeless.verify.oracles import norm
from tapeless.verify.tolerances import METAMORPHIC

STEPS = 5
BOUND = METAMORPHIC["float64"]
# Far from the usual values, so that each shows: eps as large as the gradients, b1 and b2 far apart, decay that is felt.
OPTIONS: dict[str, Any] = {"beta1": 0.6, "beta2": 0.9, "eps": 0.1, "momentum": 0.7, "weight_decay": 0.2}


def update_identities() -> Iterator[Finding]:
    for kind in ("adamw", "adam", "sgd"):
        yield from by_definition(kind)
        yield from matrices_alone_decay(kind)
    yield from clipping()


def _fixture(kind: str) -> tuple[AnyModel, Any]:
    model = build(next(case for case in MODEL_CASES if case.name == "gpt2"))
    decay = {spec.name for spec in model.store.layout.specs.values() if spec.decay}
    return model, make_optimizer(model.params, model.grads, TrainConfig(optimizer=kind, **OPTIONS), decay)


def _mean(history: list[Tensor], beta: float) -> Tensor:
    weights = [beta**age for age in reversed(range(len(history)))]
    return sum((w * x for w, x in zip(weights, history, strict=True)), torch.zeros_like(history[0])) / sum(weights)


def by_definition(kind: str) -> Iterator[Finding]:
    model, optimizer = _fixture(kind)
    b1, b2, eps, mu, wd = OPTIONS.values()
    generator = torch.Generator().manual_seed(0)
    start = values(model)
    expected, history = dict(start), {name: list[Tensor]() for name in start}
    for step in range(STEPS):
        optimizer.lr = lr = 0.1 / (1 + step)
        for name, g in model.grads.items():
            g.copy_(torch.randn(g.shape, generator=generator))
            p = expected[name]
            decay = wd if p.dim() > 1 else 0.0
            history[name].append(g.clone() if kind == "adamw" else g + decay * p)
            if kind == "sgd":
                terms = [mu**age * d for age, d in enumerate(reversed(history[name]))]
                expected[name] = p - lr * torch.stack(terms).sum(0)
            else:
                m, v = _mean(history[name], b1), _mean([g * g for g in history[name]], b2)
                expected[name] = p * (1 - lr * decay if kind == "adamw" else 1.0) - lr * m / (v.sqrt() + eps)
        optimizer.step()
    for name, p in expected.items():
        moved = norm({name: p - start[name]})
        yield Finding("L6", kind, "definition", name, norm({name: model.params[name] - p}) / moved, BOUND)


def matrices_alone_decay(kind: str) -> Iterator[Finding]:
    model, optimizer = _fixture(kind)
    start = values(model)
    optimizer.step()
    for name, w in model.params.items():
        shrunk = norm({name: w}) < norm({name: start[name]})
        wrong = not shrunk if w.dim() > 1 else not w.equal(start[name])
        yield Finding("L6", kind, "decay alone", name, float(wrong), 0.0)


def clipping() -> Iterator[Finding]:
    """The length is the limit or less, the direction as it was, and a short gradient untouched."""
    g = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    size = float(g.norm())
    for limit in (0.0, size / 3, size * 3):
        clipped = g.clone()
        told = clip_grads(clipped, limit)
        scale = min(1.0, limit / size) if limit else 1.0
        yield Finding("L6", "clipping", "true norm", f"limit {limit:.0f}", abs(told / size - 1), BOUND)
        yield Finding("L6", "clipping", "scaled", f"limit {limit:.0f}", distance(clipped, g * scale).largest, BOUND)
