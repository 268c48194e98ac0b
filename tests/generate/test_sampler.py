"""Sampling against the exact distribution: every filter against a slow, separate reference, every draw against the odds."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from tapeless.config import Sampling
from tapeless.errors import ConfigError, NonFiniteError
from tapeless.generate import sampler
from tapeless.generate.sampler import distribution, sample, uniform

V = 23


def logits_of(seed: int, dtype: type = np.float32) -> np.ndarray:  # (V,)
    z = 2.5 * np.random.default_rng(seed).standard_normal(V)
    return z.round(1).astype(dtype)  # rounded: some logits are equal


def probabilities(logits: np.ndarray, history: Sequence[int], sampling: Sampling) -> np.ndarray:  # (V,) each
    """The exact distribution: by the filters, or all on the one token of temperature 0."""
    p = np.zeros(len(logits))
    if sampling.temperature == 0:
        p[sample(logits, history, sampling, position=0)] = 1
        return p
    ids, weights = distribution(logits, history, sampling)
    assert weights.dtype == np.float64
    assert (np.diff(ids) > 0).all()
    p[ids] = weights / weights.sum()
    return p


def brute_force(logits: list[float], history: list[int], s: Sampling) -> list[float]:
    """The filters one after the other in plain Python, each followed by a softmax over what is left."""
    z = {i: x for i, x in enumerate(logits)}
    for i in set(history):
        z[i] = z[i] / s.repetition_penalty if z[i] > 0 else z[i] * s.repetition_penalty
    ranked = sorted(z, key=lambda i: (-z[i], i))
    if s.temperature == 0:
        return [float(i == ranked[0]) for i in range(len(logits))]

    def softmax(ids: list[int]) -> dict[int, float]:
        e = {i: math.exp((z[i] - z[ranked[0]]) / s.temperature) for i in ids}
        return {i: x / math.fsum(e.values()) for i, x in e.items()}

    p = softmax(ranked[: s.top_k] if s.top_k else ranked)
    left, mass = [], 0.0
    for i in p:
        if s.top_p < 1 and mass >= s.top_p:
            break
        left.append(i)
        mass += p[i]
    p = softmax(left)
    p = softmax([i for i in p if p[i] >= s.min_p * p[ranked[0]]])
    return [p.get(i, 0.0) for i in range(len(logits))]


SETTINGS = [
    Sampling(),
    Sampling(temperature=0.0),
    Sampling(temperature=0.3),
    Sampling(temperature=2.0),
    Sampling(top_k=1),
    Sampling(top_k=5),
    Sampling(top_k=V + 10),
    Sampling(top_p=0.05),
    Sampling(top_p=0.77),
    Sampling(min_p=0.13),
    Sampling(min_p=1.0),
    Sampling(repetition_penalty=1.7),
    Sampling(repetition_penalty=0.6),
    Sampling(temperature=0.0, repetition_penalty=3.0),
    Sampling(temperature=1.3, top_k=9, top_p=0.83, min_p=0.07, repetition_penalty=1.2),
]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("few", [1, 3, 64])
def test_every_filter_equals_the_slow_reference(few: int, sampling: Sampling, dtype: type, monkeypatch: pytest.MonkeyPatch):
    """few: how many logits top-p sorts at first; here the rest are needed too."""
    monkeypatch.setattr(sampler, "FEW", few)
    for seed in range(24):
        z, history = logits_of(seed, dtype), np.random.default_rng(seed).integers(V, size=6).tolist()
        expected = brute_force(z.tolist(), history, sampling)
        np.testing.assert_allclose(probabilities(z, history, sampling), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_inputs_are_not_modified(sampling: Sampling, dtype: type):
    z, history = logits_of(3, dtype), [1, 2, 2]
    before = z.tobytes()
    sample(z, history, sampling, position=7)
    assert z.tobytes() == before
    assert history == [1, 2, 2]


@pytest.mark.parametrize("seed", range(20))
def test_temperature_0_is_argmax(seed: int):
    z = logits_of(seed)
    greedy = sample(z, [], Sampling(temperature=0.0, seed=seed), position=seed)
    assert greedy == z.argmax()
    assert sample(z, [], Sampling(top_k=1, seed=seed), position=seed) == greedy


def test_a_temperature_near_0_does_not_divide_by_zero():
    p = probabilities(logits_of(0), [], Sampling(temperature=5e-324))
    assert p.argmax() == logits_of(0).argmax()
    assert p.sum() == 1


def test_of_equal_logits_the_lower_ids_are_kept():
    z = np.array([1.0, 2.0, 2.0, 3.0, 2.0, 2.0])
    kept = [set(distribution(z, [], Sampling(top_k=k))[0].tolist()) for k in range(1, 7)]
    assert kept == [{3}, {3, 1}, {3, 1, 2}, {3, 1, 2, 4}, {3, 1, 2, 4, 5}, {3, 1, 2, 4, 5, 0}]


def test_top_k_takes_the_largest_logits_and_not_the_first_ids():
    assert distribution(np.arange(10.0), [], Sampling(top_k=3))[0].tolist() == [7, 8, 9]


def test_top_p_keeps_the_token_that_reaches_it_and_no_further():
    z = np.log([0.5, 0.25, 0.125, 0.125])
    for top_p, kept in [(0.4, 1), (0.6, 2), (0.8, 3), (0.9, 4)]:
        assert len(distribution(z, [], Sampling(top_p=top_p))[0]) == kept


def test_an_excluded_token_stays_excluded():
    z = np.full(5, -np.inf)
    z[3] = -2.0
    for sampling in SETTINGS:
        assert probabilities(z, [0, 3], sampling).tolist() == [0, 0, 0, 1, 0]


def test_previous_tokens_that_cannot_be_drawn_are_no_matter():
    z, sampling = logits_of(1), Sampling(repetition_penalty=2.0)
    np.testing.assert_array_equal(probabilities(z, [2, V + 5], sampling), probabilities(z, [2], sampling))


def chi_square_is_plausible(counts: Counter[int], p: np.ndarray, n: int) -> None:
    """The statistic of fair draws has mean f and variance 2 f; five deviations is one failure in millions. The draws are
    hashes of fixed seeds, so this test gives the same answer every time."""
    assert all(p[i] > 0 for i in counts)
    likely = [i for i in range(len(p)) if p[i] * n >= 5]
    statistic = sum((counts[i] - n * p[i]) ** 2 / (n * p[i]) for i in likely)
    f = max(1, len(likely) - 1)
    assert statistic < f + 5 * math.sqrt(2 * f)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_samples_follow_the_exact_distribution(sampling: Sampling):
    z, history, rows, positions = logits_of(11), [2, 5, 7], 500, 20
    counts: Counter[int] = Counter()
    for position in range(positions):
        counts.update(sample(z, history, sampling, position=position, index=row) for row in range(rows))
    chi_square_is_plausible(counts, probabilities(z, history, sampling), rows * positions)


def test_sums_have_the_bits_of_additions_in_order():
    """Else a sample near the edge between two tokens would be another one on another version of torch."""
    for n in (1, 2, 7, 64, 1000, 32_001):
        weights = np.exp(3 * np.random.default_rng(n).standard_normal(n))
        np.testing.assert_array_equal(sampler._cumulative(weights), np.cumsum(weights))


@pytest.mark.parametrize("axis", ["seed", "index", "position"])
def test_the_hash_is_uniform_along_each_axis(axis: str):
    n, bins = 20_000, 50
    fixed = {"seed": 5, "index": 3, "position": 8}
    counts = Counter(int(bins * uniform(**(fixed | {axis: i}))) for i in range(n))
    chi_square_is_plausible(counts, np.full(bins, 1 / bins), n)


def test_neighbouring_samples_are_uncorrelated():
    u = np.array([[uniform(0, i, t) for t in range(200)] for i in range(100)])
    for left, right in [(u[:-1], u[1:]), (u[:, :-1], u[:, 1:])]:
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 5 / math.sqrt(left.size)


def test_a_sample_depends_on_seed_index_and_position_only():
    z = logits_of(2)
    first = [sample(z, [], Sampling(seed=4), position=9, index=i) for i in range(6)]
    assert len(set(first)) > 1
    sample(z, [], Sampling(seed=5), position=1)  # would move a generator
    assert [sample(z, [], Sampling(seed=4), position=9, index=i) for i in reversed(range(6))] == first[::-1]


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_unit_interval_give_valid_tokens(u: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tapeless.generate.sampler.uniform", lambda *_: u)
    for seed in range(50):
        possible, _ = distribution(logits_of(seed), [], Sampling(top_p=0.9))
        token = sample(logits_of(seed), [], Sampling(top_p=0.9), position=0)
        assert token == (possible[0] if u == 0 else possible[-1])


def test_a_token_of_probability_0_is_never_drawn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tapeless.generate.sampler.uniform", lambda *_: 0.0)
    assert sample(np.array([-np.inf, -1e4, 3.0, 2.0]), [], Sampling(), position=0) == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", SETTINGS[:8], ids=str)
def test_nonfinite_logits_are_an_error(bad: float, sampling: Sampling):
    z = logits_of(0)
    z[4] = bad
    with pytest.raises(NonFiniteError, match=f"token 4 is {bad}"):
        sample(z, [], sampling, position=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_but_minus_infinity_is_an_error(temperature: float):
    with pytest.raises(NonFiniteError, match="every logit is -inf"):
        sample(np.full(4, -np.inf), [], Sampling(temperature=temperature), position=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("seed", -1),
    ],
)
def test_bad_settings_are_named(name: str, value: float):
    with pytest.raises(ConfigError, match=name):
        Sampling(**{name: value})
