"""Draws on the device are those of the host's sampler, from the same logits and the same u."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tapeless.config import Sampling
from tapeless.generate import sampler
from tapeless.kernels.triton import sample
from tapeless.ops.op import SlotState

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
V = 43
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # the interpreter, of loop bounds


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(sample, "BLOCK", 8)
        monkeypatch.setattr(sample, "WIDTH", 32)


def state(samplings: list[Sampling], history: Tensor, limit: int = V) -> SlotState:  # history (R, n)
    numbers = [(s.temperature, s.top_p, s.min_p, s.repetition_penalty) for s in samplings]
    return SlotState(
        torch.tensor(numbers, dtype=torch.float64, device=DEVICE),
        torch.tensor([(s.top_k, limit) for s in samplings], dtype=torch.int32, device=DEVICE),
        torch.zeros(len(samplings), V, dtype=torch.int8).scatter_(1, history, 1).to(DEVICE),
        *torch.zeros(2, len(samplings), dtype=torch.int64, device=DEVICE),
    )


def draw(logits: Tensor, known: SlotState, u: list[float]) -> list[int]:  # (R, V)
    slots = torch.arange(len(logits), device=DEVICE)
    return sample.sample(logits.to(DEVICE), slots, torch.tensor(u, dtype=torch.float64, device=DEVICE), known).tolist()


def on_host(logits: Tensor, history: Tensor, sampling: Sampling, u: float) -> int:  # (V,), (n,)
    """From the host's distribution, by definition."""
    if sampling.temperature == 0:
        return sampler.sample(logits.float().numpy(), history.tolist(), sampling, position=0)
    ids, weights = sampler.distribution(logits.float().numpy(), history.tolist(), sampling)
    cumulative = weights.cumsum()
    return int(ids[np.searchsorted(cumulative, u * cumulative[-1], side="right")])


RANDOM, EQUAL = torch.randn(V) * 3, torch.zeros(V)
TIED, EXCLUDED = (RANDOM / 2).round(), RANDOM.index_fill(0, torch.arange(0, V, 3), -torch.inf)
LOGITS = {
    "random": RANDOM,
    "tied": TIED,
    "equal": EQUAL,
    "excluded": EXCLUDED,
    "signed zeros": EQUAL * -1,
    "bfloat16": TIED.bfloat16(),
}
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.7},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_k": 20, "temperature": 2.0},
    {"top_k": 1},
    {"top_k": 100},
    {"top_p": 0.8},
    {"top_k": 9, "top_p": 0.55, "repetition_penalty": 0.8},
    {"min_p": 0.11},
    {"top_k": 12, "top_p": 0.9, "min_p": 0.07, "temperature": 1.3, "repetition_penalty": 1.3},
    {"temperature": 1e-300},
]


@pytest.mark.parametrize("name", LOGITS)
def test_as_on_the_host(name: str):
    """One row for each sampling, u from both ends and between."""
    logits, samplings = LOGITS[name], [Sampling(**choice) for choice in SAMPLINGS]
    history = torch.randint(V, (len(samplings), 7))
    u = [(0.0, 0.37, 0.62, 1 - 2.0**-53)[(i + len(name)) % 4] for i in range(len(samplings))]
    known = state(samplings, history)
    found = draw(logits.expand(len(samplings), V).contiguous(), known, u)
    assert found == [on_host(logits, *row) for row in zip(history, samplings, u, strict=True)]
    assert known.tokens.tolist() == found
    assert known.positions.tolist() == [1] * len(found)
    assert known.seen.gather(1, known.tokens[:, None]).all()


def test_what_cannot_be_drawn_from_leaves_the_slot_alone():
    bad = torch.zeros(5, V)
    bad[0, 3], bad[1, 3], bad[2] = torch.nan, torch.inf, -torch.inf
    bad[3, 20:] = torch.nan  # beyond the limit: not looked at
    for sampling in (Sampling(), Sampling(temperature=0.0, repetition_penalty=2.0)):
        known = state([sampling] * 5, torch.zeros(5, 1, dtype=torch.int64), limit=20)
        known.limits[4, 1] = 0
        found = draw(bad, known, [0.99] * 5)
        assert [token >= 0 for token in found] == [False, False, False, True, False]
        assert max(found) < 20
        assert known.positions.tolist() == [0, 0, 0, 1, 0]
        assert known.seen.sum() == 5 + (found[3] != 0)
