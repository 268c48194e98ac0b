"""L6 for what comes after the gradient: clipping, and each optimizer against its own definition.

An optimizer keeps running averages, one recursion a step. By definition they are weighted means over all gradients so far,
    m / (1 - b1^t) = sum_i b1^(t-i) g_i / sum_i b1^(t-i)          the same with b2 and g_i^2 for v;   u = sum_i mu^(t-i) d_i
and a mean needs no correction for its first steps. So the history is kept here and summed anew at every step. Without
gradients only weight decay moves anything, and nothing but matrices. What Muon makes of a matrix with products is made here of
its singular values (muon_reference.py), and beside it stands the orthogonal factor itself. The average of the weights is
their mean with weights i (i + 1) … (i + 7) as long as its decay rises."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from levels.muon_reference import is_hidden, muon_step, newton_schulz, polar
from tapeless.config import TrainConfig
from tapeless.model.build import AnyModel
from tapeless.optim import make_optimizer
from tapeless.optim.clip import clip_grads
from tapeless.optim.ema import Ema
from tapeless.optim.muon import orthogonal
from tapeless.verify.finding import Finding, distance
from tapeless.verify.fixtures import MODEL_CASES, build, values
from tapeless.verify.oracles import norm
from tapeless.verify.tolerances import METAMORPHIC, NEWTON_SCHULZ, POLAR

STEPS = 5
SMALLEST = -1.5  # the smallest singular value of a matrix to be made orthogonal beside the largest, as a power of 10
BOUND = METAMORPHIC["float64"]
# Far from the usual values, so that each shows: eps as large as the gradients, b1 and b2 far apart, decay that is felt.
OPTIONS: dict[str, Any] = {"beta1": 0.6, "beta2": 0.9, "eps": 0.1, "momentum": 0.7, "weight_decay": 0.2}


def update_identities() -> Iterator[Finding]:
    for kind in ("adamw", "adam", "sgd", "muon"):
        yield from by_definition(kind)
        yield from matrices_alone_decay(kind)
    yield from orthogonal_factor()
    yield from average_of_weights()
    yield from clipping()


def _fixture(kind: str) -> tuple[AnyModel, Any]:
    model = build(next(case for case in MODEL_CASES if case.name == "gpt2"))
    decay = {spec.name for spec in model.store.layout.specs.values() if spec.decay}
    return model, make_optimizer(model.params, model.grads, TrainConfig(optimizer=kind, **OPTIONS), decay)


def _mean(history: list[Tensor], beta: float) -> Tensor:
    weights = [beta**age for age in reversed(range(len(history)))]
    return sum((w * x for w, x in zip(weights, history, strict=True)), torch.zeros_like(history[0])) / sum(weights)


def _sum(history: list[Tensor], beta: float) -> Tensor:
    return torch.stack([beta**age * x for age, x in enumerate(reversed(history))]).sum(0)


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
            history[name].append(g.clone() if kind in ("adamw", "muon") else g + decay * p)
            if kind == "muon" and is_hidden(name):
                expected[name] = p * (1 - lr * decay) - lr * muon_step(g + mu * _sum(history[name], mu))
            elif kind == "sgd":
                expected[name] = p - lr * _sum(history[name], mu)
            else:
                m, v = _mean(history[name], b1), _mean([g * g for g in history[name]], b2)
                expected[name] = p * (1 - lr * decay if kind in ("adamw", "muon") else 1.0) - lr * m / (v.sqrt() + eps)
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


def orthogonal_factor() -> Iterator[Finding]:
    """Wide, tall and square, of full rank and short of it, two at a time; and the matrix of zeros. Not short of rank in
    bfloat16, where rounding fills the missing directions and the iteration, steep at 0, takes it for something."""
    generator = torch.Generator().manual_seed(0)
    for rows, columns, rank in ((7, 13, 7), (13, 7, 7), (9, 9, 9), (12, 31, 4), (1, 5, 1)):
        left, right = (torch.linalg.qr(torch.randn(2, n, rank, generator=generator).double())[0] for n in (rows, columns))
        u = left @ torch.diag(torch.logspace(0, SMALLEST, rank).double()) @ right.mT  # (2, rows, columns)
        for dtype, bound in NEWTON_SCHULZ.items():
            if dtype == "bfloat16" and rank < min(rows, columns):
                continue
            told = orthogonal(u.to(getattr(torch, dtype)))
            for i, x in enumerate(u):
                check, what = f"orthogonal[{dtype}]", f"{rows} x {columns} of rank {rank}, {i}"
                expected = newton_schulz(x)
                away = norm({"o": told[i] - expected}) / norm({"o": expected})
                yield Finding("L6", check, "singular values", what, away, bound)
                gap = float(torch.linalg.matrix_norm(told[i].double() - polar(x), 2))
                yield Finding("L6", check, "orthogonal factor", what, gap, POLAR)
    zero = torch.zeros(1, 4, 6, dtype=torch.float64)
    yield Finding("L6", "orthogonal", "identity", "zeros", float(orthogonal(zero).abs().max()), 0.0)


def average_of_weights() -> Iterator[Finding]:
    model = build(next(case for case in MODEL_CASES if case.name == "gpt2"))
    ema, generator = Ema(model.params, decay=0.999), torch.Generator().manual_seed(0)
    total, weights = {name: torch.zeros_like(w) for name, w in model.params.items()}, 0
    for i in range(1, STEPS + 1):
        share = math.prod(range(i, i + 8))
        weights += share
        for name, w in model.params.items():
            w.copy_(torch.randn(w.shape, generator=generator))
            total[name] += share * w
        ema.update(i)
    for name, x in ema.named().items():
        away = norm({name: x - total[name] / weights}) / norm({name: x})
        yield Finding("L6", "average of the weights", "definition", name, away, BOUND)


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
