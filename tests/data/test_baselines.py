"""The counting models against the same ones written out with dictionaries."""

import math
import tracemalloc
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from tapeless.data import baselines as baselines_module
from tapeless.data.baselines import Baselines, baselines, token_blocks


def of_arrays(train: np.ndarray, val: np.ndarray, v: int) -> Baselines:
    return baselines(token_blocks(train), token_blocks(val), v)


def by_hand(train: list[int], val: list[int], v: int) -> tuple[float, float, float]:
    ones, contexts, pairs = Counter(train), Counter(train[:-1]), Counter(pairwise(train))

    def unigram(c: int) -> float:
        return (ones[c] + 1) / (len(train) + v)

    def bigram(b: int, c: int) -> float:
        return (pairs[b, c] + unigram(c)) / (contexts[b] + 1)

    assert sum(map(unigram, range(v))) == pytest.approx(1)
    assert sum(bigram(val[0], c) for c in range(v)) == pytest.approx(1)
    losses = [(-math.log(unigram(c)), -math.log(bigram(b, c))) for b, c in pairwise(val)]
    return math.log(v), float(np.mean([u for u, _ in losses])), float(np.mean([b for _, b in losses]))


@pytest.mark.parametrize(("dense", "partition"), [(True, 1000), (False, 1000), (False, 100)])
@pytest.mark.parametrize("block", [7, 1 << 20])
@pytest.mark.parametrize("v", [3, 50])
def test_against_dictionaries(dense: bool, partition: int, block: int, v: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(baselines_module, "BLOCK", block)
    monkeypatch.setattr(baselines_module, "PARTITION", partition)
    if not dense:
        monkeypatch.setattr(baselines_module, "DENSE", 0)
    rng = np.random.default_rng(v)
    train, val = rng.integers(0, v, 500).astype("<u2"), rng.integers(0, v, 100).astype("<u2")
    assert of_arrays(train, val, v) == pytest.approx(by_hand(train.tolist(), val.tolist(), v))


def test_what_they_see():
    """Alternating tokens: the bigram knows what comes next, the unigram does not."""
    tokens = np.arange(10_000) % 2
    uniform, unigram, bigram = of_arrays(tokens[:9000], tokens[9000:], 4)
    assert uniform == pytest.approx(math.log(4))
    assert unigram == pytest.approx(math.log(2), rel=1e-2)
    assert bigram < 1e-3


def test_a_token_never_seen_costs_a_finite_amount():
    assert np.isfinite(of_arrays(np.zeros(10, int), np.array([0, 5, 6, 0]), 7)).all()


def test_only_the_first_tokens_are_fitted_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(baselines_module, "FITTED", 300)
    monkeypatch.setattr(baselines_module, "BLOCK", 128)
    train, val = np.random.default_rng(0).integers(0, 9, (2, 500))
    assert of_arrays(train, val, 9) == of_arrays(train[:300], val, 9)


@pytest.mark.parametrize("v", [256, 8192])
def test_memory_does_not_grow_with_the_data(v: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(baselines_module, "BLOCK", 1 << 14)
    monkeypatch.setattr(baselines_module, "FITTED", 1 << 17)
    monkeypatch.setattr(baselines_module, "PARTITION", 1 << 15)
    peaks = []
    for count in (1 << 18, 1 << 20):
        tokens = np.random.default_rng(0).integers(0, v, count).astype("<u2")
        tracemalloc.start()
        of_arrays(tokens, tokens, v)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0] + 100_000
    assert peaks[1] < 8_000_000  # one int64 for every token would be 8 MiB
