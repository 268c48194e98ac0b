"""Inputs that expose. Sizes are distinct and mostly odd, so that no transpose or wrong axis fits by accident; no parameter
is at its initial value, where many a bug is invisible; every awkward row that data can hold stands in one of them.

A builder takes a generator and the number of positions T, and returns the inputs of one op in float64, by name."""

import torch
from torch import Generator, Tensor

from tapeless.ops.cross_entropy import IGNORED

B, T, H, G, D, C, F, V = 2, 7, 4, 2, 6, 11, 13, 23  # letters: docs/notation.md
EPS = 1e-3  # large, so that the row of small norm feels it and a difference quotient still resolves it
SMALL, LARGE = 0.03, 12.0  # a row whose square is about EPS; logits that nearly saturate a softmax

Inputs = dict[str, Tensor]


def normal(generator: Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _hidden(generator: Generator, T: int) -> Tensor:  # (B, T, C)
    """Rows of unit size, one of small norm where eps matters, one far from the origin."""
    x = normal(generator, B, T, C)
    x[0, 0] *= SMALL
    x[1, -1] += 5.0
    return x


def tokens(T: int, size: int = V) -> Tensor:  # (B, T) int64
    """Repeats within a row and between rows; most of the vocabulary unused."""
    n = torch.arange(B * T).view(B, T)
    return n * n % (size // 3)


def _targets(T: int) -> Tensor:  # (B, T) int64
    targets = tokens(T) + 5
    targets[1, -1] = IGNORED
    return targets


def embed(generator: Generator, T: int) -> Inputs:
    return {"tokens": tokens(T), "w": normal(generator, V, C)}


def positions(generator: Generator, T: int) -> Inputs:
    return {"x": normal(generator, B, T, C), "w": normal(generator, 2 * T + 3, C)}


def linear(generator: Generator, T: int) -> Inputs:
    return {"x": normal(generator, B, T, C), "w": normal(generator, F, C)}


def linear_square(generator: Generator, T: int) -> Inputs:
    """The one shape in which a transposed weight or gradient fits."""
    return {"x": normal(generator, B, T, C), "w": normal(generator, C, C)}


def linear_bias(generator: Generator, T: int) -> Inputs:
    return {**linear(generator, T), "b": normal(generator, F)}


def matmul(generator: Generator, T: int) -> Inputs:
    """Each operand is repeated along a batch axis that the other has."""
    return {"a": normal(generator, B, 1, T, D), "b": normal(generator, 3, D, F)}


def broadcast(generator: Generator, T: int) -> Inputs:
    return {"a": normal(generator, B, T, 1), "b": normal(generator, 3, 1, 1, C)}


def logits(generator: Generator, T: int) -> Inputs:
    x = normal(generator, B, T, V)
    x[0, 0] *= LARGE
    return {"x": x}


def pointwise(generator: Generator, T: int) -> Inputs:
    """Both tails, and nothing so near to zero that a difference quotient would straddle the kink of relu."""
    x = 2 * normal(generator, B, T, F)
    x = x + 0.05 * x.sign()
    x[0, 0, 0], x[0, 0, 1] = 15.0, -15.0
    return {"x": x}


def gate_up(generator: Generator, T: int) -> Inputs:
    return {"gate_up": 2 * normal(generator, B, T, 2 * F)}


def norm(generator: Generator, T: int) -> Inputs:
    return {"x": _hidden(generator, T), "w": 1 + 0.5 * normal(generator, C)}


def norm_bias(generator: Generator, T: int) -> Inputs:
    return {**norm(generator, T), "b": normal(generator, C)}


def with_delta(inputs: Inputs, generator: Generator) -> Inputs:
    """x and delta whose sum is the norm's fixture."""
    delta = normal(generator, *inputs["x"].shape)
    return {**inputs, "x": inputs["x"] - delta, "delta": delta}


def add_norm(generator: Generator, T: int) -> Inputs:
    return with_delta(norm(generator, T), generator)


def add_norm_bias(generator: Generator, T: int) -> Inputs:
    return with_delta(norm_bias(generator, T), generator)


def rope(generator: Generator, T: int) -> Inputs:
    return {"x": normal(generator, B, H, T, D)}


def qkv(generator: Generator, T: int) -> Inputs:
    x = normal(generator, B, T, (H + 2 * G) * D)
    x[0, 0] *= SMALL
    return {"qkv": x}


def qkv_norm(generator: Generator, T: int) -> Inputs:
    weights = {name: 1 + 0.5 * normal(generator, D) for name in ("wq_norm", "wk_norm")}
    return {**qkv(generator, T), **weights}


def _attention(generator: Generator, T: int, S: int, kv_heads: int) -> Inputs:
    """One head with scores large enough that its softmax is nearly saturated."""
    q, k, v = (normal(generator, B, heads, n, D) for heads, n in ((H, T), (kv_heads, S), (kv_heads, S)))
    q[0, 0] *= LARGE / 3
    return {"q": q, "k": k, "v": v}


def attention_mha(generator: Generator, T: int) -> Inputs:
    return _attention(generator, T, T, H)


def attention_gqa(generator: Generator, T: int) -> Inputs:
    return _attention(generator, T, T, G)


def attention_mqa(generator: Generator, T: int) -> Inputs:
    return _attention(generator, T, T, 1)


def attention_long(generator: Generator, T: int) -> Inputs:
    """Seventy positions, and six heads in three groups: more than one block of a kernel, and groups that are not halves."""
    long = T if T == 1 else 10 * T
    q, k, v = (0.5 * normal(generator, 1, heads, long, 2) for heads in (6, 3, 3))
    return {"q": q, "k": k, "v": v}


def attention_cache(generator: Generator, T: int) -> Inputs:
    return _attention(generator, T, T + 4, G)


def attention_documents(generator: Generator, T: int) -> Inputs:
    """The borders of the documents differ between the rows, and one document is a single position."""
    t = torch.arange(T)
    return {**attention_gqa(generator, T), "documents": torch.stack([t // 3, (t + 1) // 2])}


def dropout(generator: Generator, T: int) -> Inputs:
    return {"x": normal(generator, B, T, C)}


def cross_entropy(generator: Generator, T: int) -> Inputs:
    """One row so low that its log-sum-exp is negative."""
    z = logits(generator, T)["x"]
    z[1, 0] -= 10
    return {"logits": z, "targets": _targets(T)}


def linear_cross_entropy(generator: Generator, T: int) -> Inputs:
    return {"x": _hidden(generator, T), "targets": _targets(T), "w": normal(generator, V, C)}
