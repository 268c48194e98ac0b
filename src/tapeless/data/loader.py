"""Which tokens are in which batch: pure functions of the seed, so that a resumed run needs nothing but a number.

An epoch cuts the tokens into W windows of stride T, from an offset in [0, T) that is a function of (seed, epoch), and visits
each once, in an order that is a permutation by (seed, epoch). Sample k of the run is
    epoch = k // W      window = order(epoch)[k % W]      start = offset(epoch) + T window      tokens[start : start + T + 1]
whatever the batch size or the number of ranks; a batch may span two epochs. W is the same for every offset, so up to T - 1
tokens at either end are left out in an epoch; the next has another offset.

With document masking (the first token of each document is given) a batch also has the document id of each token, and the first
token of a document is no target: a document packed with others then gives the same loss and gradients as it would alone.
Instruction data have examples instead of windows: each once in an epoch, in an order that is a permutation by (seed, epoch).
Tested by: tests/data/test_loader.py, tests/data/test_instructions.py."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from tapeless.data.instructions import BEGINS, COUNTS
from tapeless.data.prepare import Dataset
from tapeless.data.rng import draws, key, permutation
from tapeless.data.token_files import Tokens, as_plain, require_window
from tapeless.errors import DataError

IGNORED = -100  # the target that no loss counts


class _Epochs(ABC):
    """Every window once in an epoch, in a random order."""

    seq_len: int

    def __init__(self, num_windows: int, batch_size: int, seed: int):
        self.num_windows, self.batch_size, self.seed = num_windows, batch_size, seed
        self._orders: dict[int, np.ndarray] = {}

    def windows(self, first_sample: int, count: int) -> list[tuple[int, np.ndarray]]:
        """The windows of consecutive samples, by epoch."""
        parts, sample, end = [], first_sample, first_sample + count
        while sample < end:
            epoch, place = divmod(sample, self.num_windows)
            found = self.order(epoch)[place : place + end - sample]
            parts.append((epoch, found))
            sample += len(found)
        return parts

    @abstractmethod
    def rows(self, first_sample: int, count: int) -> tuple[Tensor, ...]:  # tokens, targets, document_ids if masked (count, T)
        """Consecutive samples of the run, int64."""

    def batch(self, first_sample: int) -> tuple[Tensor, ...]:  # tokens, targets, document_ids if masked (B, T) int64
        return self.rows(first_sample, self.batch_size)

    def epoch_of(self, sample: int) -> int:
        return sample // self.num_windows

    def order(self, epoch: int) -> np.ndarray:  # (W,)
        if epoch not in self._orders:
            previous = {e: order for e, order in self._orders.items() if e == epoch - 1}  # a batch may span two epochs
            self._orders = previous | {epoch: permutation(key(self.seed, "order", epoch), self.num_windows)}
        return self._orders[epoch]


class Loader(_Epochs):
    def __init__(
        self,
        tokens: Tokens,  # (n,) any integer type; a memory map is read only where it is needed
        seq_len: int,
        batch_size: int,
        seed: int,
        starts: np.ndarray | None = None,  # (d,) int64: the first token of each document, for document masking
    ):
        require_window(len(tokens), seq_len, "training")
        super().__init__(max(1, (len(tokens) - seq_len) // seq_len), batch_size, seed)
        self.tokens, self.seq_len, self.starts = tokens, seq_len, starts
        self.offset = lru_cache(maxsize=2)(self._offset)

    def _offset(self, epoch: int) -> int:
        room = min(self.seq_len, len(self.tokens) - self.num_windows * self.seq_len)  # below T with fewer than 2 T tokens
        return int(draws(key(self.seed, "offset", epoch), 0, 1)[0] % np.uint64(room))

    def begins(self, first_sample: int, count: int) -> np.ndarray:  # (count,) int64
        """Where consecutive samples of the run begin."""
        parts = self.windows(first_sample, count)
        return np.concatenate([self.offset(epoch) + self.seq_len * windows for epoch, windows in parts])

    def rows(self, first_sample: int, count: int) -> tuple[Tensor, ...]:  # tokens, targets, document_ids if masked (count, T)
        return windows_at(self.tokens, self.begins(first_sample, count), self.seq_len, self.starts)


def windows_at(
    tokens: Tokens,  # (n,)
    begins: np.ndarray,  # (N,)
    seq_len: int,
    starts: np.ndarray | None,  # (d,) int64: of documents, for document masking
) -> tuple[Tensor, ...]:  # tokens, targets, document_ids if masked (N, T) int64
    """A window that extends beyond the last token is padded with targets that no loss counts."""
    positions = begins[:, None] + np.arange(seq_len + 1)  # (N, T + 1)
    ids = as_plain(tokens)[np.minimum(positions, len(tokens) - 1)].astype(np.int64)
    windows, targets = torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(ids[:, 1:].copy())
    if begins.max() + seq_len >= len(tokens):
        targets[torch.from_numpy(positions[:, 1:] >= len(tokens))] = IGNORED
    if starts is None:
        return windows, targets
    document_ids = torch.from_numpy(np.searchsorted(starts, positions, side="right"))  # (N, T + 1)
    same = document_ids[:, 1:] == document_ids[:, :-1]
    return windows, targets.masked_fill(~same, IGNORED), document_ids[:, :-1].contiguous()


class Examples:
    """Instruction examples as rows of T tokens and their targets."""

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

    def rows(self, which: np.ndarray) -> tuple[Tensor, Tensor]:  # (N,) -> tokens, targets (N, T) int64
        spans = self.spans[which]
        positions = spans[:, :1] + np.arange(self.seq_len + 1)  # (N, T + 1)
        inside = positions < spans[:, 1:]
        positions = np.where(inside, positions, 0)
        ids = np.where(inside, as_plain(self.tokens)[positions].astype(np.int64), 0)
        targets = np.where((inside & self.counts[positions])[:, 1:], ids[:, 1:], IGNORED)
        return torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(targets)


class ExampleLoader(_Epochs):
    """Like Loader, with examples instead of windows."""

    def __init__(self, examples: Examples, batch_size: int, seed: int):
        super().__init__(len(examples.spans), batch_size, seed)
        self.examples, self.seq_len = examples, examples.seq_len

    def rows(self, first_sample: int, count: int) -> tuple[Tensor, ...]:  # tokens, targets (count, T) int64
        return self.examples.rows(np.concatenate([windows for _, windows in self.windows(first_sample, count)]))


class ValidationSet:
    """Always the same rows: all, or `limit` evenly spaced ones. They are read batch by batch when they are needed."""

    def __init__(self, rows: Callable[[np.ndarray], tuple[Tensor, ...]], count: int, seq_len: int, limit: int = 0):
        """rows: from row numbers (N,) to tokens, targets, and document_ids if masked (N, T) int64. limit 0: all."""
        self.rows, self.seq_len = rows, seq_len
        self.chosen = np.arange(limit) * count // limit if 0 < limit < count else np.arange(count)

    def __len__(self) -> int:
        return len(self.chosen)

    def batches(self, size: int) -> Iterator[tuple[Tensor, ...]]:
        return (self.rows(self.chosen[first : first + size]) for first in range(0, len(self), size))


def training_batches(
    data: Dataset,
    seq_len: int,
    batch_size: int,
    seed: int,
    starts: np.ndarray | None = None,  # (d,) int64: of documents, for document masking
) -> Loader | ExampleLoader:
    if data.roles is None:
        return Loader(data.train, seq_len, batch_size, seed, starts)
    return ExampleLoader(Examples(data.train, data.roles[0], seq_len, "training"), batch_size, seed)


def validation_set(
    data: Dataset,
    seq_len: int,
    limit: int = 0,  # 0: all rows
    starts: np.ndarray | None = None,  # (d,) int64: of documents, for document masking
) -> ValidationSet:
    if data.roles is None:
        return validation_windows(data.val, seq_len, limit, starts)
    examples = Examples(data.val, data.roles[1], seq_len, "validation")
    return ValidationSet(examples.rows, len(examples.spans), seq_len, limit)


def validation_windows(
    tokens: Tokens,  # (n,)
    seq_len: int,
    limit: int = 0,
    starts: np.ndarray | None = None,
) -> ValidationSet:
    """Windows of stride T from the first token, so that all of them predict every token but the first once."""
    require_window(len(tokens), seq_len, "validation")
    count = math.ceil((len(tokens) - 1) / seq_len)
    return ValidationSet(lambda which: windows_at(tokens, which * seq_len, seq_len, starts), count, seq_len, limit)
