"""The bytes of the sources are fixed for ever, and their entropy is what the mathematics says and what the bytes show."""

import hashlib
import math
from itertools import pairwise

import numpy as np
import pytest

from tapeless.data.synthetic import SOURCES, ArithmeticSource, MarkovSource, Source

MARKOV, ARITHMETIC = MarkovSource(), ArithmeticSource()


def symbols(source: Source, count: int) -> np.ndarray:
    return np.frombuffer(source.generate(count), np.uint8).astype(np.int64)


def loss_of(source: Source, text: str) -> float:
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    return source.loss(tokens[:1], tokens[None, 1:])


@pytest.mark.parametrize(
    ("source", "sha256"),
    [
        (MARKOV, "3563cc9783599394a9f2bcdadbec33d80b5e6b069f7b52e1cad88d2d861be039"),
        (ARITHMETIC, "506b3d8e8b695958cd717f8319064b67ec4f41eaa0566f0b397bd2a35c26106c"),
    ],
    ids=["markov", "arithmetic"],
)
def test_the_same_bytes_everywhere(source: Source, sha256: str):
    assert hashlib.sha256(source.generate(10_000)).hexdigest() == sha256


@pytest.mark.parametrize("name", SOURCES)
def test_a_longer_text_begins_like_a_shorter_one(name: str):
    source = SOURCES[name]()
    for count in (1, 7, 1001):
        assert source.generate(count) == source.generate(50_000)[:count]
    assert SOURCES[name](seed=1).generate(1000) != source.generate(1000)


@pytest.mark.parametrize("source", [MARKOV, ARITHMETIC], ids=["markov", "arithmetic"])
def test_the_distribution_is_stationary(source: Source):
    pi = source.stationary
    moved = np.bincount(source.successor.ravel(), (pi[:, None] * source.probability).ravel(), len(pi))
    np.testing.assert_allclose(source.probability.sum(1), 1, rtol=1e-12)
    np.testing.assert_allclose(moved, pi, atol=1e-14)
    assert pi.sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("source", [MARKOV, ARITHMETIC], ids=["markov", "arithmetic"])
def test_the_text_costs_the_source_its_entropy(source: Source):
    tokens = symbols(source, 200_001)
    one_window = source.loss(tokens[:1], tokens[None, 1:])
    assert one_window == pytest.approx(source.entropy_rate, rel=0.01)
    windows = source.loss(tokens[:-1:500], tokens[1:].reshape(-1, 500))
    assert one_window < windows < one_window + 0.02  # each window has to find its place first


def test_markov_rows():
    """Order 2 indeed: the same last symbol, another before it, other successors; and 16 of them, in multiples of 1/256."""
    p = MARKOV.probability.reshape(64, 64, 64)  # (before last, last, next)
    assert ((p > 0).sum(-1) == 16).all()
    np.testing.assert_array_equal(p * 256, np.round(p * 256))
    assert len(np.unique(MARKOV.probability, axis=0)) == 16
    assert all(len(np.unique(p[:, b], axis=0)) == 4 and len(np.unique(p[b], axis=0)) == 4 for b in range(64))


def test_markov_frequencies_are_the_probabilities():
    tokens = symbols(MARKOV, 500_000)
    index = np.zeros(256, np.int64)
    index[list(MARKOV.alphabet)] = np.arange(64)
    x = index[tokens]
    counts = np.bincount((x[:-2] * 64 + x[1:-1]) * 64 + x[2:], minlength=64**3).reshape(4096, 64)
    np.testing.assert_allclose(counts.sum(1) / counts.sum(), MARKOV.stationary, atol=1e-3)
    p, row = np.unique(MARKOV.probability, axis=0, return_inverse=True)  # (16, 64) the rows that differ, (4096,) which one
    by_row = np.zeros((16, 64))
    np.add.at(by_row, row.ravel(), counts)
    visits = by_row.sum(1, keepdims=True)
    assert visits.min() > 1000
    assert not by_row[p == 0].any()
    assert (np.abs(by_row - visits * p) <= 5 * np.sqrt(visits * p * (1 - p))).all()


def test_arithmetic_is_correct_and_uniform():
    lines = ARITHMETIC.generate(200_000).decode().split("\n")[:-1]
    pairs = []
    for line in lines:
        left, result = line.split("=")
        a, b = map(int, left.split("+"))
        assert a + b == int(result)
        assert line == f"{a}+{b}={a + b}"
        pairs.append(100 * a + b)
    tens = np.bincount(np.array(pairs) // 100, minlength=100)
    assert np.abs(tens - len(pairs) / 100).max() < 5 * math.sqrt(len(pairs) / 100)


def test_arithmetic_entropy_has_a_closed_form():
    lengths = [len(f"{a}+{b}={a + b}\n") for a in range(100) for b in range(100)]
    assert pytest.approx(math.log(10_000) / np.mean(lengths), rel=1e-9) == ARITHMETIC.entropy_rate


def test_arithmetic_losses_by_hand():
    """From a line's end on: each whole line costs ln 10000; a sum that is wrong, or another alphabet, is impossible."""
    assert loss_of(ARITHMETIC, "\n37+58=95\n") * 9 == pytest.approx(math.log(10_000))
    assert loss_of(ARITHMETIC, "\n0+0=0\n99+99=198\n") * 16 == pytest.approx(2 * math.log(10_000))
    assert loss_of(ARITHMETIC, "\n37+58=96\n") == math.inf
    assert loss_of(ARITHMETIC, "\n37+58=95x") == math.inf
    assert loss_of(ARITHMETIC, "x0+0=0") == math.inf


def test_a_window_in_the_middle_is_filtered_exactly():
    """P(c | b) by Bayes over a long text's pairs, which is what the filter must give behind a single symbol."""
    tokens = symbols(MARKOV, 1_000_000)
    pairs = np.bincount(tokens[:-1] * 256 + tokens[1:], minlength=65536).reshape(256, 256)
    b, c = np.unravel_index(pairs.argmax(), pairs.shape)
    counted = -math.log(pairs[b, c] / pairs[b].sum())
    assert MARKOV.loss(np.array([b]), np.array([[c]])) == pytest.approx(counted, abs=0.05)


@pytest.mark.parametrize("source", [MARKOV, ARITHMETIC], ids=["markov", "arithmetic"])
def test_windows_and_ignored_targets_add_up(source: Source):
    """Several windows at once are the mean over their targets, and -100 ends one."""
    tokens = symbols(source, 3 * 40 + 1)
    starts = [0, 40, 80, 120]
    parts = [tokens[a : b + 1] for a, b in pairwise(starts)]
    alone = [source.loss(part[:1], part[None, 1:]) for part in parts]
    together = np.stack([part[1:] for part in parts])
    first = np.array([part[0] for part in parts])
    assert source.loss(first, together) == pytest.approx(np.mean(alone))
    together[2, 11:] = -100
    short = source.loss(parts[2][:1], parts[2][None, 1:12])
    assert source.loss(first, together) == pytest.approx((40 * alone[0] + 40 * alone[1] + 11 * short) / 91)
