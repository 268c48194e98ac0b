"""Evaluation: the forward pass of training, on the same windows each time, read batch by batch.

Tested by: tests/train/test_evaluate.py."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.data.loader import ValidationSet
from tapeless.dist.world import ALONE, World
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
    world: World = ALONE,
) -> Evaluation | None:
    """The mean over all valid targets; None if `stopped` returned True on the way. rows: of a batch that fits into a GPU, which
    then gets as many at a time; on a CPU the batches, and with them the bits, do not depend on it. world: of several ranks each
    computes some of the batches; `stopped` must be the same on all."""
    losses, count, num_batches = [torch.zeros((), device=model.device)], 0, 0
    for i, batch in enumerate(_batches(model, windows, rows if model.device.type == "cuda" else 0)):
        if stopped():
            return None
        if i % world.size == world.rank:
            losses.append(model.loss(batch.tokens, batch.targets, num_targets=1, check=False, **batch.options))
        count, num_batches = count + batch.num_targets, i + 1
    total = sum(world.in_turn(torch.stack(losses)[1:].tolist(), num_batches))  # read at the end
    mean = total / count
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
