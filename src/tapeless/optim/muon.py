"""Muon: momentum, made orthogonal, for the matrices inside the model; AdamW for the rest (embeddings, head, norms, biases).

    m = mu m + (1 - mu) g                 u = m, or with Nesterov mu m + (1 - mu) g once more
    o = orthogonal(u)                     p = p (1 - lr wd) - lr 0.2 max(rows, columns)^(1/2) o
A step of steepest descent where a matrix is measured by how far it can stretch any vector: with u = U S V', that direction is
U V', all singular values 1. orthogonal(u) comes near it with products alone, five times over
    x = a x + (b (x x') + c (x x')^2) x                                     from x = u / |u|, |u| the root of its squares' sum
which leaves U and V as they are and sends each singular value s through s -> a s + b s^3 + c s^5. The coefficients are those
of K. Jordan and others (2024): steep at 0, and what has grown stays between 0.68 and 1.21, which is near enough by their
trials. u's length does not matter, so neither does a correction of m for its first steps.
Scale. The root mean square of an orthogonal matrix is max(rows, columns)^(-1/2). The factor makes that of a step 0.2 lr for
every shape, about what AdamW's is (Liu and others, 2025), so that one lr, one decay and one schedule serve both parts.
Each matrix by itself. In the flat buffer wq, wk, wv lie side by side, as do w_gate, w_up, for products to read them at once.
But they are different maps, whose outputs no norm sees together: made orthogonal as one, the steps of the three would
compete for the same singular directions, and a step would depend on what a kernel finds practical to join.
In bfloat16 on a CUDA device, else in the dtype of the parameters, float32 or float64. Matrices of one shape go together.
Tested by: tests/optim/test_muon.py, by singular values and against torch.optim; L4 to L6 as every optimizer."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tapeless.optim.adamw import AdamW, pieces
from tapeless.optim.flat import FlatOptimizer, decayed_spans, named_views, spans_without

NOT_HIDDEN = ("embed.w", "pos.w", "head.w")  # matrices whose rows belong to tokens and places, one by one
A, B, C, ITERATIONS = 3.4445, -4.7750, 2.0315, 5
SHORTEST = 1e-7  # what |u| is taken for below that: without gradients there is no step
STEP = 0.2  # root mean square of a step, in lr
TOGETHER = 2**24  # elements that go through at once: enough to fill a GPU, little beside the parameters of a large model


def orthogonal(
    u: Tensor,  # (k, rows, columns)
) -> Tensor:  # (k, rows, columns)
    """Near the orthogonal factor of each matrix: singular values between 0.68 and 1.21, but for those below 0.002 |u|."""
    x = u.mT if u.shape[-2] > u.shape[-1] else u  # the smaller side first: x x' is of that size
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(SHORTEST)
    for _ in range(ITERATIONS):
        xx = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(xx, xx, xx, beta=B, alpha=C), x, beta=A)
    return x.mT if u.shape[-2] > u.shape[-1] else x


def products_dtype(p: Tensor) -> torch.dtype:
    return torch.bfloat16 if p.dtype == torch.float32 and p.device.type == "cuda" else p.dtype


def batches(matrices: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names of matrices of one shape, as many as go through at once."""
    shapes: dict[torch.Size, list[str]] = {}
    for name, w in matrices.items():
        shapes.setdefault(w.shape, []).append(name)
    for shape, names in shapes.items():
        k = max(1, TOGETHER // shape.numel())
        yield from (names[i : i + k] for i in range(0, len(names), k))


class Muon(AdamW):
    options = (*AdamW.options, "momentum", "nesterov")

    def __init__(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        *,
        momentum: float = 0.9,
        nesterov: bool = True,
        **options: Any,
    ):
        """options: those of AdamW, whose lr, weight_decay and decay hold for the matrices too."""
        super().__init__(params, grads, **options)
        self.capturable = False  # update_on_device would leave the matrices out
        params = self._views  # of what trains
        self.momentum, self.nesterov = momentum, nesterov
        self._matrices = {name: w for name, w in params.items() if w.dim() == 2 and name not in NOT_HIDDEN}
        self._batches = list(batches(self._matrices))
        self._gradients = {name: grads[name] for name in self._matrices}
        self._momenta = named_views(self.state["exp_avg"], self._matrices)
        self._rest = spans_without(params, len(self.params), self._matrices)
        self._decayed_spans = decayed_spans(params, self.decay - set(self._matrices)) if self.weight_decay else []
        self._pieces = pieces(self._decayed_spans, self._rest).to(self.params.device)

    def step(self, *, scale: float = 1.0, copy: Tensor | None = None) -> bool:
        return FlatOptimizer.step(self, scale=scale, copy=copy)

    def _update(self) -> None:
        self.t += 1
        for names in self._batches:
            self._turn(names)
        if self.fused is not None:
            device = self.params.device
            self.update_on_device(self.step_scalars(self.t).to(device), torch.ones((), device=device), None)
        else:
            g = self._decay()
            for span in self._rest:
                self._move(g, span)

    def _turn(self, names: list[str]) -> None:
        """One step of some matrices of one shape."""
        w = self._matrices[names[0]]
        o = orthogonal(torch.stack([self._direction(name) for name in names]).to(products_dtype(w)))  # (k, rows, columns)
        for name, each in zip(names, o, strict=True):
            w = self._matrices[name]
            if name in self.decay:
                w *= 1 - self.lr * self.weight_decay
            w.add_(each, alpha=-self.lr * STEP * math.sqrt(max(w.shape)))

    def _direction(self, name: str) -> Tensor:  # (rows, columns)
        g, m = self._gradients[name], self._momenta[name]
        m.lerp_(g, 1 - self.momentum)
        return m.lerp(g, 1 - self.momentum) if self.nesterov else m

    def named_state(self) -> dict[str, dict[str, Tensor]]:
        """The momenta of the matrices lie where AdamW has first moments; second moments there are none of them."""
        moments = super().named_state()
        rest = {key: {name: x for name, x in views.items() if name not in self._matrices} for key, views in moments.items()}
        groups = {"momentum": dict(self._momenta), **rest}
        return {key: views for key, views in groups.items() if views}  # a checkpoint has no place for a group of nothing
