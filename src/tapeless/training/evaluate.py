"""Evaluation: the forward pass of training, on the same windows each time, read batch by batch.

Tested by: tests/train/test_evaluate.py."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.data.loader import ValidationSet
from tapeless.model.build import AnyModel
from tapeless.model.check import check_targets, check_tokens
from tapeless.ops.cross_entropy import IGNORED

TOKENS = 4096  # per forward: evaluation must not need more memory than training


class Evaluation(NamedTuple):
    val_loss: float  # nats per token
    perplexity: float
    bits_per_byte: float


class Batch(NamedTuple):
    tokens: Tensor  # (n, T) int64, on the model's device
    targets: Tensor  # (n, T) int64; -100 is not counted
    options: dict[str, Any]  # documents (n, T): attention stays inside each, if documents are masked
    num_targets: int


def rows_at_once(seq_len: int) -> int:
    return max(1, TOKENS // seq_len)


def _batches(model: AnyModel, windows: ValidationSet, rows: int = 0) -> Iterator[Batch]:
    """rows: at least so many windows each. Ids are checked here, since on a GPU a check would wait for the device."""
    V = model.config.vocab_size
    for tokens, targets, *document_ids in windows.batches(max(rows, rows_at_once(windows.seq_len))):
        check_tokens(tokens, V, tokens.device)
        check_targets(targets, tokens, V)
        options = {"documents": document_ids[0].to(model.device)} if document_ids else {}
        yield Batch(tokens.to(model.device), targets.to(model.device), options, int((targets != IGNORED).sum()))


def evaluate(
    model: AnyModel,
    windows: ValidationSet,
    bytes_per_token: float,
    *,
    rows: int = 0,
    stopped: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """The mean over all valid targets; None if `stopped` returned True on the way. rows: of a batch that fits into a GPU, which
    then gets as many at a time; on a CPU the batches, and with them the bits, do not depend on it."""
    total, count = torch.zeros((), dtype=torch.float64, device=model.device), 0
    for batch in _batches(model, windows, rows if model.device.type == "cuda" else 0):
        if stopped():
            return None
        total += model.loss(batch.tokens, batch.targets, num_targets=1, check=False, **batch.options)  # read at the end
        count += batch.num_targets
    mean = float(total) / count
    if not math.isfinite(mean):
        model.store.raise_if_non_finite()
    return Evaluation(mean, math.inf if mean > 700 else math.exp(mean), mean / math.log(2) / bytes_per_token)


def accuracy(model: AnyModel, windows: ValidationSet) -> tuple[float, int]:
    """The share of valid targets that are the likeliest prediction, and the number of valid targets."""
    right = count = 0
    for batch in _batches(model, windows):
        right += int((model.logits(batch.tokens, **batch.options).argmax(-1) == batch.targets).sum())
        count += batch.num_targets
    return right / count, count
