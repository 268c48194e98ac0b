"""Evaluation: the same forward as training, on the same windows each time.

Tested by: tests/train/test_evaluate.py."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from tapeless.model.build import AnyModel
from tapeless.ops.cross_entropy import IGNORED

TOKENS = 4096  # per forward: evaluation must not need more memory than training


class Evaluation(NamedTuple):
    val_loss: float  # nats per token
    perplexity: float
    bits_per_byte: float


Options = dict[str, Any]  # document ids (n, T), if masked


def rows_at_once(seq_len: int) -> int:
    return max(1, TOKENS // seq_len)


def _batches(
    model: AnyModel, tokens: Tensor, targets: Tensor, documents: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Options]]:  # tokens, targets (n, T)
    rows = rows_at_once(tokens.shape[1])
    batch = [tokens, targets] if documents is None else [tokens, targets, documents]
    for x, y, *ids in zip(*(part.split(rows) for part in batch), strict=True):
        yield x.to(model.device), y.to(model.device), {"documents": ids[0].to(model.device)} if ids else {}


def evaluate(
    model: AnyModel,
    tokens: Tensor,  # (N, T) int64
    targets: Tensor,  # (N, T) int64; -100 is not counted
    bytes_per_token: float,
    *,
    documents: Tensor | None = None,  # (N, T) int64: attention stays inside each
    stopped: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """The mean over all valid targets; None if `stopped` returned True."""
    loss = 0.0
    for x, y, options in _batches(model, tokens, targets, documents):
        if stopped():
            return None
        loss += float(model.loss(x, y, num_targets=1, **options))
    mean = loss / int((targets != IGNORED).sum())
    return Evaluation(mean, math.inf if mean > 700 else math.exp(mean), mean / math.log(2) / bytes_per_token)


def accuracy(model: AnyModel, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> float:
    """The share of valid targets (N, T) that are the most likely prediction."""
    right = sum(
        int((model.logits(x, **options).argmax(-1) == y).sum()) for x, y, options in _batches(model, tokens, targets, documents)
    )
    return right / int((targets != IGNORED).sum())
