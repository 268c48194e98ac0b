"""What a model is trained and validated on: windows of a text, or examples of instructions.

Tested by: tests/data/test_instructions.py."""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from tapeless.data.instructions import BEGINS, COUNTS
from tapeless.data.joined import Tokens, as_plain
from tapeless.data.loader import IGNORED, Loader, validation_windows
from tapeless.data.prepare import Dataset
from tapeless.data.rng import key, permutation
from tapeless.errors import DataError


class Examples:
    """Examples as rows of T tokens and their targets."""

    def __init__(
        self,
        tokens: Tokens,  # (n,)
        roles: np.ndarray,  # (n,)
        seq_len: int,
        part: str,
    ):
        self.tokens, self.counts, self.seq_len = tokens, (np.asarray(roles) & COUNTS).astype(bool), seq_len
        starts = np.flatnonzero(np.asarray(roles) & BEGINS)
        ends = np.append(starts[1:], len(tokens))
        fits = [
            bool(self.counts[start + 1 : min(end, start + seq_len + 1)].any()) for start, end in zip(starts, ends, strict=True)
        ]
        self.spans = np.stack([starts, ends], 1)[fits]  # (e, 2)
        self.num_examples, self.left_out = len(starts), len(starts) - len(self.spans)
        if not len(self.spans):
            raise DataError(f"no example of the {part} part has a completion that begins within seq_len = {seq_len} tokens")

    def rows(self, which: Iterable[int]) -> tuple[Tensor, Tensor]:  # tokens, targets (N, T) int64
        spans = self.spans[list(which)]
        places = spans[:, :1] + np.arange(self.seq_len + 1)  # (N, T + 1)
        inside = places < spans[:, 1:]
        places = np.where(inside, places, 0)
        ids = np.where(inside, as_plain(self.tokens)[places].astype(np.int64), 0)
        targets = np.where((inside & self.counts[places])[:, 1:], ids[:, 1:], IGNORED)
        return torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(targets)


class ExampleLoader:
    """As Loader, with examples for windows: each once in an epoch, in an order that is a permutation by (seed, epoch)."""

    def __init__(self, examples: Examples, batch_size: int, seed: int):
        self.examples, self.batch_size, self.seed = examples, batch_size, seed
        self.num_windows = len(examples.spans)

    def epoch_of(self, sample: int) -> int:
        return sample // self.num_windows

    def batch(self, first_sample: int) -> tuple[Tensor, Tensor]:  # tokens, targets (B, T) int64
        places = [divmod(first_sample + b, self.num_windows) for b in range(self.batch_size)]
        return self.examples.rows(int(_order(self.seed, epoch, self.num_windows)[place]) for epoch, place in places)


@lru_cache(maxsize=2)  # a batch may lie across the border of two epochs
def _order(seed: int, epoch: int, count: int) -> np.ndarray:  # (count,)
    return permutation(key(seed, "order", epoch), count)


def training_batches(
    data: Dataset,
    seq_len: int,
    batch_size: int,
    seed: int,
    starts: np.ndarray | None = None,  # (d,) int64: of documents that are kept apart
) -> Loader | ExampleLoader:
    if data.roles is None:
        return Loader(data.train, seq_len, batch_size, seed, starts)
    return ExampleLoader(Examples(data.train, data.roles[0], seq_len, "training"), batch_size, seed)


def validation_batch(
    data: Dataset,
    seq_len: int,
    limit: int = 0,  # 0: all of them
    starts: np.ndarray | None = None,  # (d,) int64: as the loader's
) -> tuple[Tensor, ...]:  # tokens, targets, and documents if kept apart (N, T) int64
    """Always the same rows: all, or `limit` evenly spaced ones."""
    if data.roles is None:
        return validation_windows(data.val, seq_len, limit, starts)
    examples = Examples(data.val, data.roles[1], seq_len, "validation")
    count = len(examples.spans)
    return examples.rows(range(count) if not 0 < limit < count else (i * count // limit for i in range(limit)))
