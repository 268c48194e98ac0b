"""Inputs that expose bugs. Sizes are distinct and mostly odd, so that no transpose or wrong axis fits by accident; no parameter
is at its initial value, where many bugs are invisible; every difficult row that data can contain is in one of them.

A builder takes a generator and a Shape, and returns the inputs of one op in float64, by name."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from tapeless.ops.cross_entropy import IGNORED


class Shape(NamedTuple):
    """Letters: docs/notation.md."""

    B: int = 2
    T: int = 7
    H: int = 4
    G: int = 2
    D: int = 6
    C: int = 11
    F: int = 13
    V: int = 23


EPS = 1e-3  # large, so that the row of small norm feels it and a difference quotient still resolves it
SMALL, LARGE = 0.03, 12.0  # a row whose square is about EPS; logits that nearly saturate a softmax

Inputs = dict[str, Tensor]
Builder = Callable[[Generator, Shape], Inputs]


def normal(generator: Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _hidden(generator: Generator, s: Shape) -> Tensor:  # (B, T, C)
    """Rows of unit size, one of small norm where eps matters, one far from the origin, unless there is only one."""
    x = normal(generator, s.B, s.T, s.C)
    x[0, 0] *= SMALL
    x.view(-1, s.C)[1:][-1:] += 5.0
    return x


def tokens(s: Shape) -> Tensor:  # (B, T) int64
    """Repeats within a row and between rows; most of the vocabulary unused."""
    n = torch.arange(s.B * s.T).view(s.B, s.T)
    return n * n % (s.V // 3)


def _targets(s: Shape) -> Tensor:  # (B, T) int64
    """The last is ignored, unless it is the only one."""
    targets = tokens(s) + 5
    targets.view(-1)[1:][-1:] = IGNORED
    return targets


def random(**axes: str) -> Builder:
    """Inputs of normal numbers, each with its axes as letters of Shape; R is the rank of an adapter."""

    def build(generator: Generator, s: Shape) -> Inputs:
        sizes = {**s._asdict(), "R": s.G + 1}
        return {name: normal(generator, *(sizes[axis] for axis in letters)) for name, letters in axes.items()}

    return build


linear = random(x="BTC", w="FC")
linear_square = random(x="BTC", w="CC")  # the one shape in which a transposed weight or gradient fits
linear_bias = random(x="BTC", w="FC", b="F")
lora = random(x="BTC", a="RC", b="FR")
lora_square = random(x="BTD", a="DD", b="DD")  # rank, input and output of one size: whatever is transposed fits
dropout = random(x="BTC")
rope = random(x="BHTD")


def embed(generator: Generator, s: Shape) -> Inputs:
    return {"tokens": tokens(s), "w": normal(generator, s.V, s.C)}


def positions(generator: Generator, s: Shape) -> Inputs:
    return {"x": normal(generator, s.B, s.T, s.C), "w": normal(generator, 2 * s.T + 3, s.C)}


def lora_down(generator: Generator, s: Shape) -> Inputs:
    return {**gate_up(generator, s), "a": normal(generator, s.G + 1, s.F), "b": normal(generator, s.C, s.G + 1)}


def matmul(generator: Generator, s: Shape) -> Inputs:
    """Each operand is repeated along a batch axis that the other has."""
    return {"a": normal(generator, s.B, 1, s.T, s.D), "b": normal(generator, 3, s.D, s.F)}


def broadcast(generator: Generator, s: Shape) -> Inputs:
    return {"a": normal(generator, s.B, s.T, 1), "b": normal(generator, 3, 1, 1, s.C)}


def logits(generator: Generator, s: Shape) -> Inputs:
    x = normal(generator, s.B, s.T, s.V)
    x[0, 0] *= LARGE
    return {"x": x}


def pointwise(generator: Generator, s: Shape) -> Inputs:
    """Both tails, and nothing so near to zero that a difference quotient would straddle the kink of relu."""
    x = 2 * normal(generator, s.B, s.T, s.F)
    x = x + 0.05 * x.sign()
    x[0, 0, 0], x[0, 0, 1] = 15.0, -15.0
    return {"x": x}


def gate_up(generator: Generator, s: Shape) -> Inputs:
    return {"gate_up": 2 * normal(generator, s.B, s.T, 2 * s.F)}


def ffn_down(generator: Generator, s: Shape, *, gated: bool, bias: bool) -> Inputs:
    middle = gate_up(generator, s)["gate_up"] if gated else pointwise(generator, s)["x"]
    inputs = {"gate_up": middle, "w": normal(generator, s.C, s.F)}
    return {**inputs, "b": normal(generator, s.C)} if bias else inputs


def norm(generator: Generator, s: Shape) -> Inputs:
    return {"x": _hidden(generator, s), "w": 1 + 0.5 * normal(generator, s.C)}


def norm_bias(generator: Generator, s: Shape) -> Inputs:
    return {**norm(generator, s), "b": normal(generator, s.C)}


def _with_delta(inputs: Inputs, generator: Generator) -> Inputs:
    """x and delta whose sum is the norm's fixture."""
    delta = normal(generator, *inputs["x"].shape)
    return {**inputs, "x": inputs["x"] - delta, "delta": delta}


def add_norm(generator: Generator, s: Shape) -> Inputs:
    return _with_delta(norm(generator, s), generator)


def add_norm_bias(generator: Generator, s: Shape) -> Inputs:
    return _with_delta(norm_bias(generator, s), generator)


def qkv(generator: Generator, s: Shape) -> Inputs:
    x = normal(generator, s.B, s.T, (s.H + 2 * s.G) * s.D)
    x[0, 0] *= SMALL
    return {"qkv": x}


def qkv_norm(generator: Generator, s: Shape) -> Inputs:
    weights = {name: 1 + 0.5 * normal(generator, s.D) for name in ("wq_norm", "wk_norm")}
    return {**qkv(generator, s), **weights}


def _attention(generator: Generator, s: Shape, kv_heads: int, cached: int = 0) -> Inputs:
    """One head with scores large enough that its softmax is nearly saturated."""
    S = s.T + cached
    q, k, v = (normal(generator, s.B, heads, n, s.D) for heads, n in ((s.H, s.T), (kv_heads, S), (kv_heads, S)))
    q[0, 0] *= LARGE / 3
    return {"q": q, "k": k, "v": v}


def _attention_long(generator: Generator, s: Shape) -> Inputs:
    """Seventy positions, and six heads in three groups: more than one block of a kernel, and groups that are not halves."""
    long = s.T if s.T == 1 else 10 * s.T
    q, k, v = (0.5 * normal(generator, 1, heads, long, 2) for heads in (6, 3, 3))
    return {"q": q, "k": k, "v": v}


def _attention_documents(generator: Generator, s: Shape) -> Inputs:
    """The borders of the documents differ between the rows, and one document is a single position."""
    t = torch.arange(s.T)
    return {**_attention(generator, s, s.G), "documents": torch.stack([(t + b) // (3 - b % 2) for b in range(s.B)])}


ATTENTION: dict[str, Builder] = {
    "mha": lambda generator, s: _attention(generator, s, s.H),
    "gqa": lambda generator, s: _attention(generator, s, s.G),
    "mqa": lambda generator, s: _attention(generator, s, 1),
    "long": _attention_long,
    "cache": lambda generator, s: _attention(generator, s, s.G, cached=4),
    "documents": _attention_documents,
}


def cross_entropy(generator: Generator, s: Shape) -> Inputs:
    """One row so low that its log-sum-exp is negative."""
    z = logits(generator, s)["x"]
    z[-1, 0] -= 10
    return {"logits": z, "targets": _targets(s)}


def linear_cross_entropy(generator: Generator, s: Shape) -> Inputs:
    return {"x": _hidden(generator, s), "targets": _targets(s), "w": normal(generator, s.V, s.C)}
