"""Baselines for a validation loss: models that only count, fitted on the training tokens, measured on the validation tokens.

    uniform   ln V
    unigram   p(c)     = (n_c + 1) / (N + V)                one pseudo-count per id
    bigram    p(c | b) = (n_bc + p(c)) / (n_b + 1)          one pseudo-count per context, distributed as the unigram
Means of -ln p in nats per token over the same targets, all validation tokens but the first. They are fitted on the first
FITTED training tokens at most. Both parts are read in blocks. Pairs are counted in a table of up to DENSE entries; with larger
vocabularies they are sorted, one partition of the pairs after the other, so memory does not grow with the data.
Tested by: tests/data/test_baselines.py."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from tapeless.data.token_files import BLOCK, Tokens

FITTED = 1 << 25
DENSE = 1 << 24  # entries
PARTITION = 1 << 22  # training pairs sorted at a time


class Baselines(NamedTuple):
    uniform: float
    unigram: float
    bigram: float


Blocks = Callable[[], Iterator[np.ndarray]]  # (n,) int64 each; every call starts from the first block


def token_blocks(tokens: Tokens, mask: np.ndarray | None = None, bit: int = 0) -> Blocks:
    """All tokens (n,), or those whose `mask` (n,) has `bit` set."""

    def blocks() -> Iterator[np.ndarray]:
        for start in range(0, len(tokens), BLOCK):
            block = tokens[start : start + BLOCK].astype(np.int64)
            yield block if mask is None else block[(mask[start : start + BLOCK] & bit) > 0]

    return blocks


def baselines(train: Blocks, val: Blocks, vocab_size: int) -> Baselines:
    train = partial(_first, train, FITTED)
    counts, last = np.zeros(vocab_size, np.int64), np.empty(0, np.int64)
    for block in train():
        counts += np.bincount(block, minlength=vocab_size)
        last = block[-1:] if len(block) else last  # is no context
    contexts = counts - np.bincount(last, minlength=vocab_size)  # (V,)
    probability = (counts + 1) / (counts.sum() + vocab_size)  # (V,)
    num_parts = 1
    while vocab_size**2 > DENSE and num_parts * PARTITION < counts.sum():
        num_parts *= 2
    unigram = bigram = num_targets = 0.0
    for part in range(num_parts):
        pair_count = _pair_counts(_pairs(train(), vocab_size, part, num_parts), vocab_size)
        for keys, times in _pairs(val(), vocab_size, part, num_parts):
            b, c = np.divmod(keys, vocab_size)
            p = probability[c]
            unigram -= float((times * np.log(p)).sum())
            bigram -= float((times * np.log((pair_count(keys) + p) / (contexts[b] + 1))).sum())
            num_targets += int(times.sum())
    mean = 1 / num_targets if num_targets else math.nan
    return Baselines(math.log(vocab_size), unigram * mean, bigram * mean)


def _first(blocks: Blocks, count: int) -> Iterator[np.ndarray]:
    for block in blocks():
        yield block[:count]
        count -= len(block)
        if count <= 0:
            return


def _pairs(blocks: Iterator[np.ndarray], vocab_size: int, part: int, num_parts: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Of one partition of all pairs (b, c) of neighbours, block by block: keys b V + c in ascending order (k,), and how often
    each occurs (k,). num_parts: a power of two."""
    last = np.empty(0, np.int64)
    for block in blocks:
        block = np.concatenate([last, block])
        last, b, c = block[-1:], block[:-1], block[1:]
        keys = b * vocab_size + c
        if vocab_size**2 <= DENSE:
            yield keys, np.ones(len(keys), np.uint32)
        else:
            yield np.unique(keys[((b + c) & (num_parts - 1)) == part], return_counts=True)


def _pair_counts(pairs: Iterator[tuple[np.ndarray, np.ndarray]], vocab_size: int) -> Callable[[np.ndarray], np.ndarray]:
    """A function from keys (m,) to how often each pair occurs (m,)."""
    if vocab_size**2 <= DENSE:
        table = np.zeros(vocab_size**2, np.uint32)
        for keys, times in pairs:
            np.add.at(table, keys, times)
        return table.__getitem__
    keys, times = (np.concatenate(blocks) for blocks in zip(*pairs, strict=True))
    order = np.argsort(keys, kind="stable")  # merges the sorted blocks
    keys = keys[order]
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    keys, totals = keys[first], np.add.reduceat(times[order], first) if len(first) else times

    def lookup(wanted: np.ndarray) -> np.ndarray:
        at = np.searchsorted(keys, wanted)
        at[at == len(keys)] = 0
        return np.where(keys[at] == wanted, totals[at], 0) if len(keys) else np.zeros(len(wanted), int)

    return lookup
