"""Sampling against the exact distribution: every filter against a slow, separate reference, every draw against the odds."""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from tapeless.config import Sampling
from tapeless.errors import ConfigError, NonFiniteError
from tapeless.generate.sampler import probabilities, sample, uniform

NO_HISTORY = torch.empty(1, 0, dtype=torch.int64)
V = 23


def logits_of(seed: int, rows: int = 1, *, dtype: torch.dtype = torch.float32) -> Tensor:  # (rows, V)
    z = 2.5 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return z.round(decimals=1).to(dtype)  # rounded: some logits are equal


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_every_filter_equals_the_slow_reference(sampling: Sampling, dtype: torch.dtype):
    for seed in range(8):
        z = logits_of(seed, rows=3, dtype=dtype)
        history = torch.randint(V, (3, 6), generator=torch.Generator().manual_seed(seed))
        expected = [brute_force(row.tolist(), past, sampling) for row, past in zip(z.double(), history.tolist(), strict=True)]
        p = probabilities(z, history, sampling)
        assert p.dtype == torch.float64
        torch.testing.assert_close(p, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_inputs_are_not_modified(sampling: Sampling, dtype: torch.dtype):
    z, history = logits_of(3, rows=2, dtype=dtype), torch.tensor([[1, 2], [3, 3]])
    before, past = z.clone(), history.clone()
    sample(z, history, sampling, position=7)
    assert z.view(torch.uint8).equal(before.view(torch.uint8))
    assert history.equal(past)


@pytest.mark.parametrize("seed", range(20))
def test_temperature_0_is_argmax(seed: int):
    z = logits_of(seed, rows=4)
    greedy = sample(z, NO_HISTORY.expand(4, 0), Sampling(temperature=0.0, seed=seed), position=seed)
    assert greedy.equal(z.argmax(-1))
    assert sample(z, NO_HISTORY.expand(4, 0), Sampling(top_k=1, seed=seed), position=seed).equal(greedy)


def test_a_temperature_near_0_does_not_divide_by_zero():
    p = probabilities(logits_of(0), NO_HISTORY, Sampling(temperature=5e-324))
    assert p.argmax() == logits_of(0).argmax()
    assert p.sum() == 1


def test_of_equal_logits_the_lower_ids_are_kept():
    z = torch.tensor([[1.0, 2.0, 2.0, 3.0, 2.0, 2.0]])
    kept = [set(probabilities(z, NO_HISTORY, Sampling(top_k=k))[0].nonzero()[:, 0].tolist()) for k in range(1, 7)]
    assert kept == [{3}, {3, 1}, {3, 1, 2}, {3, 1, 2, 4}, {3, 1, 2, 4, 5}, {3, 1, 2, 4, 5, 0}]


def test_top_k_takes_the_largest_logits_and_not_the_first_ids():
    z = torch.arange(10.0)[None]
    assert probabilities(z, NO_HISTORY, Sampling(top_k=3))[0].nonzero()[:, 0].tolist() == [7, 8, 9]


def test_top_p_keeps_the_token_that_reaches_it_and_no_further():
    z = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log2() * math.log(2)
    for top_p, kept in [(0.4, 1), (0.6, 2), (0.8, 3), (0.9, 4)]:
        assert int((probabilities(z, NO_HISTORY, Sampling(top_p=top_p)) > 0).sum()) == kept


def test_an_excluded_token_stays_excluded():
    z = torch.full((1, 5), -torch.inf)
    z[0, 3] = -2.0
    for sampling in SETTINGS:
        assert probabilities(z, torch.tensor([[0, 3]]), sampling)[0].tolist() == [0, 0, 0, 1, 0]


def chi_square_is_plausible(counts: Counter[int], p: Tensor, n: int) -> None:
    """The statistic of fair draws has mean f and variance 2 f; five deviations is one failure in millions. The draws are
    hashes of fixed seeds, so this test gives the same answer every time."""
    assert all(p[i] > 0 for i in counts)
    likely = [i for i in range(len(p)) if p[i] * n >= 5]
    statistic = sum((counts[i] - n * p[i].item()) ** 2 / (n * p[i].item()) for i in likely)
    f = max(1, len(likely) - 1)
    assert statistic < f + 5 * math.sqrt(2 * f)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_samples_follow_the_exact_distribution(sampling: Sampling):
    z, history = logits_of(11), torch.tensor([[2, 5, 7]])
    p, rows, positions = probabilities(z, history, sampling)[0], 500, 20
    counts: Counter[int] = Counter()
    for position in range(positions):
        counts.update(sample(z.expand(rows, -1), history.expand(rows, -1), sampling, position=position).tolist())
    chi_square_is_plausible(counts, p, rows * positions)


@pytest.mark.parametrize("axis", ["seed", "sample_index", "position"])
def test_the_hash_is_uniform_along_each_axis(axis: str):
    n, bins = 20_000, 50
    fixed = {"seed": 5, "sample_index": 3, "position": 8}
    counts = Counter(int(bins * uniform(**(fixed | {axis: i}))) for i in range(n))
    chi_square_is_plausible(counts, torch.full((bins,), 1 / bins, dtype=torch.float64), n)


def test_neighbouring_samples_are_uncorrelated():
    u = torch.tensor([[uniform(0, i, t) for t in range(200)] for i in range(100)], dtype=torch.float64)
    for left, right in [(u[:-1], u[1:]), (u[:, :-1], u[:, 1:])]:
        correlation = torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(left.numel())


def test_a_sample_depends_on_seed_index_and_position_only():
    z = logits_of(2).expand(6, -1)
    history = NO_HISTORY.expand(6, 0)
    together = sample(z, history, Sampling(seed=4), position=9)
    sample(z, history, Sampling(seed=5), position=1)  # would move a generator
    apart = [sample(z[:1], history[:1], Sampling(seed=4), position=9, first_sample=i) for i in range(6)]
    assert together.equal(torch.cat(apart))


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_unit_interval_give_valid_tokens(u: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tapeless.generate.sampler.uniform", lambda *_: u)
    for seed in range(50):
        z = logits_of(seed)
        p = probabilities(z, NO_HISTORY, Sampling(top_p=0.9))
        token = sample(z, NO_HISTORY, Sampling(top_p=0.9), position=0)
        possible = p[0].nonzero()[:, 0]
        assert token == (possible[0] if u == 0 else possible[-1])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nonfinite_logits_are_an_error(bad: float, temperature: float):
    z = logits_of(0, rows=2)
    z[1, 4] = bad
    with pytest.raises(NonFiniteError, match=f"token 4 in row 1 is {bad}"):
        sample(z, NO_HISTORY.expand(2, 0), Sampling(temperature=temperature), position=0)


def test_a_row_of_minus_infinity_is_an_error():
    with pytest.raises(NonFiniteError, match="every logit of a row is -inf"):
        probabilities(torch.full((1, 4), -torch.inf), NO_HISTORY, Sampling())


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
