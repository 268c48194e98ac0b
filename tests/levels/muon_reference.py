"""Muon once more, by singular values instead of products: the oracle of L4 and L6.

An odd polynomial of a matrix is that polynomial of its singular values, U and V being left as they are. So the iteration is
five times a formula of numbers here, and what it aims at, the orthogonal factor, is U V'.
Tested by: tests/optim/test_muon.py."""

from collections.abc import Sequence

import torch
from torch import Tensor


def newton_schulz(u: Tensor) -> Tensor:  # (rows, columns) float64
    left, s, right = torch.linalg.svd(u.double(), full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return left @ torch.diag(s) @ right


def polar(u: Tensor) -> Tensor:  # (rows, columns) float64
    """U V' over the singular values that there are; those that are nothing but rounding have no direction to speak of."""
    left, s, right = torch.linalg.svd(u.double(), full_matrices=False)
    return left @ torch.diag((s > 1e-10 * s.max()).double()) @ right


def muon_step(u: Tensor) -> Tensor:  # (rows, columns) float64
    """What a learning rate of 1 would take away: of root mean square 0.2 if all singular values were 1."""
    rows, columns = u.shape
    return 0.2 * max(rows, columns) ** 0.5 * newton_schulz(u)


def is_hidden(name: str) -> bool:
    """Whether a parameter is a matrix that Muon takes, by its name in docs/notation.md."""
    return name == "hidden.w" or ".attn.w" in name or ".ffn.w_" in name


class TheirMuon:
    """For tensors that autograd has left gradients at. The textbook's form: momentum is not damped, Nesterov steps ahead."""

    def __init__(self, weights: Sequence[Tensor], momentum: float, nesterov: bool, weight_decay: float):
        self.weights, self.momentum, self.nesterov, self.weight_decay = weights, momentum, nesterov, weight_decay
        self.velocities = [torch.zeros_like(w) for w in weights]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for w, v in zip(self.weights, self.velocities, strict=True):
            assert w.grad is not None
            v.copy_(self.momentum * v + w.grad)
            u = w.grad + self.momentum * v if self.nesterov else v
            w.copy_(w - lr * self.weight_decay * w - lr * muon_step(u))
