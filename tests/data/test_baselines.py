"""The counting models against the same ones written out with dictionaries."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from tapeless.data import baselines as baselines_module
from tapeless.data.baselines import baselines


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


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("v", [3, 50])
def test_against_dictionaries(dense: bool, v: int, monkeypatch: pytest.MonkeyPatch):
    if not dense:
        monkeypatch.setattr(baselines_module, "DENSE", 0)
    rng = np.random.default_rng(v)
    train, val = rng.integers(0, v, 500).astype("<u2"), rng.integers(0, v, 100).astype("<u2")
    assert baselines(train, val, v) == pytest.approx(by_hand(train.tolist(), val.tolist(), v))


def test_what_they_see():
    """Alternating tokens: the bigram knows what comes next, the unigram does not."""
    tokens = np.arange(10_000) % 2
    uniform, unigram, bigram = baselines(tokens[:9000], tokens[9000:], 4)
    assert uniform == pytest.approx(math.log(4))
    assert unigram == pytest.approx(math.log(2), rel=1e-2)
    assert bigram < 1e-3


def test_a_token_never_seen_costs_a_finite_amount():
    assert np.isfinite(baselines(np.zeros(10, int), np.array([0, 5, 6, 0]), 7)).all()
