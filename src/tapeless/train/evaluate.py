"""Evaluation: the same forward as training, on the same windows each time.

Judged by: tests/train/test_evaluate.py."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

from tapeless.model.build import AnyModel
from tapeless.ops.cross_entropy import IGNORED

TOKENS = 4096  # in one forward: evaluation must not need more memory than training


class Evaluation(NamedTuple):
    val_loss: float  # nats per token
    perplexity: float
    bits_per_byte: float


def rows_at_once(seq_len: int) -> int:
    return max(1, TOKENS // seq_len)


def _pieces(model: AnyModel, tokens: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:  # (n, T) both
    rows = rows_at_once(tokens.shape[1])
    for x, y in zip(tokens.split(rows), targets.split(rows), strict=True):
        yield x.to(model.device), y.to(model.device)


def evaluate(
    model: AnyModel,
    tokens: Tensor,  # (N, T) int64
    targets: Tensor,  # (N, T) int64; -100 is not counted
    bytes_per_token: float,
    *,
    stopped: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """The mean over all valid targets; None where `stopped` said so on the way."""
    loss = 0.0
    for x, y in _pieces(model, tokens, targets):
        if stopped():
            return None
        loss += float(model.loss(x, y, num_targets=1))
    mean = loss / int((targets != IGNORED).sum())
    return Evaluation(mean, math.inf if mean > 700 else math.exp(mean), mean / math.log(2) / bytes_per_token)


def accuracy(model: AnyModel, tokens: Tensor, targets: Tensor) -> float:
    """The share of valid targets (N, T) that are the likeliest prediction."""
    right = sum(int((model.logits(x).argmax(-1) == y).sum()) for x, y in _pieces(model, tokens, targets))
    return right / int((targets != IGNORED).sum())
