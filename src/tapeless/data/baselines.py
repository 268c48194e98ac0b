"""What a loss has to beat: models that only count, fitted on the training tokens, measured on the validation tokens.

    uniform   ln V
    unigram   p(c)     = (n_c + 1) / (N + V)                one imagined count for each id
    bigram    p(c | b) = (n_bc + p(c)) / (n_b + 1)          one imagined count for each context, shared out as the unigram
Means of -ln p in nats per token over the same targets, all validation tokens but the first. They are fitted on the first
FITTED training tokens at most, which is plenty for counting.
Tested by: tests/data/test_baselines.py."""

import math
from typing import NamedTuple

import numpy as np

from tapeless.data.joined import Tokens

FITTED = 1 << 25
DENSE = 1 << 24  # a table of counts up to this size, sorting beyond


class Baselines(NamedTuple):
    uniform: float
    unigram: float
    bigram: float


def baselines(train: Tokens, val: Tokens, vocab_size: int) -> Baselines:  # train (n,), val (m,)
    train, val = train[:FITTED].astype(np.int64), val[:].astype(np.int64)
    counts = np.bincount(train, minlength=vocab_size)  # (V,)
    unigram = (counts + 1) / (len(train) + vocab_size)
    p = unigram[val[1:]]  # (m - 1,)
    contexts = np.bincount(train[:-1], minlength=vocab_size)[val[:-1]]
    pairs = _count(train[:-1] * vocab_size + train[1:], val[:-1] * vocab_size + val[1:], vocab_size**2)
    return Baselines(math.log(vocab_size), _mean_loss(p), _mean_loss((pairs + p) / (contexts + 1)))


def _mean_loss(p: np.ndarray) -> float:
    return float(-np.log(p).mean())


def _count(keys: np.ndarray, wanted: np.ndarray, size: int) -> np.ndarray:  # how often each wanted one is among the keys
    if size <= DENSE:
        return np.bincount(keys, minlength=size)[wanted]
    present, counts = np.unique(keys, return_counts=True)
    at = np.minimum(np.searchsorted(present, wanted), len(present) - 1)
    return np.where(present[at] == wanted, counts[at], 0)
