"""Token embedding: row lookup.                          letters: docs/notation.md

    y[n] = w[tokens[n]]
Backward. A token that occurs several times sums the gradients of all its positions:
    dw[v] += sum over n with tokens[n] = v of dy[n]
Tokens are integers and have no gradient. Saved: the tokens.
Tested by: tests/ops/test_embed.py."""

from typing import NamedTuple

from torch import Tensor

from tapeless.ops.numerics import rows
from tapeless.ops.op import Op


class EmbedSaved(NamedTuple):
    tokens: Tensor  # (...) int64


def embed_forward(
    tokens: Tensor,  # (...) int64
    w: Tensor,  # (V, C)
) -> tuple[Tensor, EmbedSaved]:  # y (..., C)
    return w[tokens], EmbedSaved(tokens)


def embed_backward(
    dy: Tensor,  # (..., C)
    saved: EmbedSaved,
    w: Tensor,  # (V, C)
    dw: Tensor | None,  # (V, C)  accumulated into
) -> None:
    if dw is not None:
        dw.index_add_(0, saved.tokens.reshape(-1), rows(dy).to(dw.dtype))


EMBED = Op(embed_forward, embed_backward, grads=())
