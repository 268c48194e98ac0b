"""Scores are sums of log-probabilities, each token once, for any batch and any length."""

import pytest
import torch

from tapeless.config import ModelConfig
from tapeless.model.transformer import Transformer
from tapeless.tasks.scoring import Score, Window, score, windows

LENGTH = 8
SHAPE = {"vocab_size": 31, "hidden_dim": 24, "num_layers": 2, "num_heads": 4, "intermediate_dim": 40, "max_seq_len": LENGTH}


@pytest.fixture(scope="module")
def model() -> Transformer:
    """Larger weights: well separated logits."""
    made = Transformer(ModelConfig(**SHAPE), seed=1)
    for w in made.params.values():
        w *= 3
    return made


def draw(count: int, seed: int) -> list[int]:
    return torch.randint(31, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PAIRS = [(draw(k, k), draw(n, 40 + n)) for k, n in [(1, 1), (3, 2), (7, 1), (8, 1), (20, 5), (1, 8), (4, 8), (5, 9), (1, 33)]]


def by_definition(model: Transformer, context: list[int], continuation: list[int]) -> float:
    """Token by token in float64: which tokens each is predicted from follows from where the window that holds it ends."""
    double = Transformer(model.config, dtype="float64")
    for name, w in double.params.items():
        w.copy_(model.params[name])
    whole, total = context + continuation, 0.0
    for i in range(len(context), len(whole)):
        piece = (i - len(context)) // LENGTH
        end = min(len(context) + (piece + 1) * LENGTH, len(whole))
        seen = whole[max(0, end - 1 - LENGTH) : i]
        total += float(double.logits(torch.tensor([seen]))[0, -1].log_softmax(-1)[whole[i]])
    return total


def test_windows_of_the_module_docstring():
    c, t = [100], list(range(1, 11))
    assert list(windows(c, t, 4)) == [
        Window([100, 1, 2, 3], [1, 2, 3, 4]),
        Window([4, 5, 6, 7], [5, 6, 7, 8]),
        Window([6, 7, 8, 9], [9, 10]),
    ]
    assert list(windows([1, 2, 3, 4, 5], [6, 7], 4)) == [Window([3, 4, 5, 6], [6, 7])]
    assert list(windows([1, 2], [3], 4)) == [Window([1, 2], [3])]
    assert list(windows([1, 2], [], 4)) == []


@pytest.mark.parametrize("length", [1, 2, 3, 7])
@pytest.mark.parametrize("count", range(1, 23))
def test_each_token_is_predicted_once_from_those_before_it(length: int, count: int):
    context, continuation = [-2, -1, 0], list(range(1, count + 1))
    found = list(windows(context, continuation, length))
    assert [token for window in found for token in window.targets] == continuation
    for window in found:
        assert 1 <= len(window.targets) <= len(window.inputs) <= length
        assert [token + 1 for token in window.inputs][-len(window.targets) :] == window.targets
        assert len(window.inputs) == min(length, window.targets[-1] + 2)  # as many as can be seen


def test_scores_are_sums_of_log_probabilities(model: Transformer):
    found = score(model, PAIRS, length=LENGTH, batch_size=4)
    expected = [by_definition(model, *pair) for pair in PAIRS]
    assert [one.logprob for one in found] == pytest.approx(expected, rel=1e-5)


def test_neither_order_nor_batch_changes_a_score(model: Transformer):
    alone = [score(model, [pair], length=LENGTH, batch_size=1)[0] for pair in PAIRS]
    for batch_size in (2, 100):
        for found, expected in zip(score(model, PAIRS, length=LENGTH, batch_size=batch_size), alone, strict=True):
            assert found.logprob == pytest.approx(expected.logprob, rel=1e-5)
            assert found.greedy == expected.greedy
    turned = score(model, PAIRS[::-1], length=LENGTH, batch_size=3)[::-1]
    assert [one.logprob for one in turned] == pytest.approx([one.logprob for one in alone], rel=1e-5)


def test_greedy_means_every_token_is_the_most_likely(model: Transformer):
    context, likely = draw(3, 5), []
    for _ in range(4):
        likely.append(int(model.logits(torch.tensor([context + likely]))[0, -1].argmax()))
    assert score(model, [(context, likely)], length=LENGTH, batch_size=1)[0].greedy
    for place in range(4):
        other = [*likely[:place], (likely[place] + 1) % 31, *likely[place + 1 :]]
        assert not score(model, [(context, other)], length=LENGTH, batch_size=1)[0].greedy


def test_an_empty_continuation_scores_zero(model: Transformer):
    assert score(model, [([1], []), ([1], [2])], length=LENGTH, batch_size=2)[0] == Score(0.0, True)
    assert score(model, [], length=LENGTH, batch_size=2) == []


def test_track_sees_the_batches(model: Transformer):
    sizes: list[int] = []

    def watch(batches: list[list[int]]) -> list[list[int]]:
        sizes.extend(map(len, batches))
        return batches

    score(model, PAIRS, length=LENGTH, batch_size=6, track=watch)
    assert sizes == [6, 6, 2]  # of 14 windows: a continuation of 33 makes 5, one of 9 two
