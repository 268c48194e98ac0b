"""Decoding with a kv_cache is the full forward, in parts."""

import pytest
import torch

from tapeless.errors import InputError
from tapeless.verify.finding import distance
from tapeless.verify.fixtures import TRANSFORMER_CASES, B, ModelCase, T, batch, build
from tapeless.verify.tolerances import METAMORPHIC

CASES = [pytest.param(case, id=case.name) for case in TRANSFORMER_CASES]


@pytest.mark.parametrize("chunks", [[1] * T, [3, 2, 2], [T - 1, 1], [T]], ids=str)
@pytest.mark.parametrize("dtype", METAMORPHIC)
@pytest.mark.parametrize("case", CASES)
def test_parts_equal_the_whole(case: ModelCase, dtype: str, chunks: list[int]):
    model, (tokens, _) = build(case, dtype), batch()
    kv_cache = model.kv_cache(B, T + 1)
    parts = [model.logits(part, kv_cache=kv_cache) for part in tokens.split(chunks, 1)]
    assert kv_cache.length == T
    assert distance(torch.cat(parts, 1), model.logits(tokens)).largest <= METAMORPHIC[dtype]


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_decodes_in_its_own_dtype(case: ModelCase):
    model, (tokens, _) = build(case, "bfloat16"), batch()
    kv_cache = model.kv_cache(B, T)
    assert kv_cache.stacked["keys"][0].dtype == torch.bfloat16
    assert model.logits(tokens, kv_cache=kv_cache).dtype == torch.bfloat16


def test_what_lies_beyond_the_length_is_never_read():
    model, (tokens, _) = build(TRANSFORMER_CASES[0]), batch()
    kv_cache = model.kv_cache(B, 2 * T)
    kv_cache.stacked["keys"][0].fill_(torch.nan)
    kv_cache.stacked["values"][0].fill_(torch.nan)
    assert model.logits(tokens, kv_cache=kv_cache).isfinite().all()


def test_a_refused_call_leaves_the_cache_as_it_was():
    model, (tokens, _) = build(TRANSFORMER_CASES[0]), batch()
    kv_cache = model.kv_cache(B, T + 1)
    model.logits(tokens, kv_cache=kv_cache)
    with pytest.raises(InputError, match=f"kv_cache holds {T} of {T + 1} tokens, no room for 2 more"):
        model.logits(tokens[:, :2], kv_cache=kv_cache)
    assert kv_cache.length == T
    assert model.logits(tokens[:, :1], kv_cache=kv_cache).shape == (B, 1, 23)


@pytest.mark.parametrize("case", CASES)
def test_a_copied_prefix_continues_like_its_source(case: ModelCase):
    model, (tokens, _) = build(case), batch()
    kv_cache = model.kv_cache(3, T)
    source, target = kv_cache.row(0), kv_cache.row(2)
    expected = model.logits(tokens[:1], kv_cache=source)
    assert kv_cache.has_prefixes
    kv_cache.copy_prefix(0, 2, T - 2)
    target.length = T - 2
    continued = model.logits(tokens[:1, -2:], kv_cache=target)
    assert distance(continued, expected[:, -2:]).largest <= METAMORPHIC["float64"]
    for name in ("keys", "values"):
        for stack in kv_cache.stacked[name]:
            assert torch.equal(stack[:, 2, :, : T - 2], stack[:, 0, :, : T - 2])


@pytest.mark.parametrize(
    ("slots", "positions", "words"),
    [
        ([0, 2], [1, 1], "distinct rows"),
        ([-1, 0], [1, 1], "distinct rows"),
        ([1, 1], [1, 2], "distinct rows"),
        ([0, 1], [1, T + 1], f"expected 0 to {T}"),
        ([0, 1], [-1, 0], f"expected 0 to {T}"),
    ],
)
def test_a_token_outside_the_cache_is_refused(slots: list[int], positions: list[int], words: str):
    model = build(TRANSFORMER_CASES[0])
    with pytest.raises(InputError, match=words):
        model.decode(torch.tensor([1, 2]), torch.tensor(slots), torch.tensor(positions), model.kv_cache(2, T + 1))
