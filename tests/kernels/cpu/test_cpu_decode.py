"""One more token of each of several sequences: the full forward's numbers, and each row's bits its own."""

from operator import attrgetter

import pytest
import torch

pytest.importorskip("numba")

from tapeless.config import ModelConfig
from tapeless.kernels.cpu import decode
from tapeless.model.cache import KVCache
from tapeless.model.transformer import Transformer
from tapeless.verify.finding import distance
from tapeless.verify.fixtures import TRANSFORMER_CASES, ModelCase, move_off_init

# Matrices that threads share in several pieces, each with a shorter rest; heads narrower and wider than a vector, and shared.
WIDE = ModelConfig(
    vocab_size=1003,
    hidden_dim=250,
    num_layers=2,
    num_heads=9,
    num_kv_heads=3,
    head_dim=26,
    intermediate_dim=301,
    max_seq_len=64,
)
CASES = [*TRANSFORMER_CASES, TRANSFORMER_CASES[0]._replace(name="wide", config=WIDE)]
DTYPES = [("float32", 1e-5), ("bfloat16", 0.03)]


def build(case: ModelCase, dtype: str, ops: str = "cpu") -> Transformer:
    model = Transformer(case.config, dtype=dtype, ops=ops, initialized=False)
    move_off_init(model, seed=1)
    return model


@pytest.mark.parametrize("case", CASES, ids=attrgetter("name"))
@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
def test_decoding_equals_the_full_forward(case: ModelCase, dtype: str, bound: float):
    """Sequences that begin one after the other, some after a prompt, in shuffled slots; against float64 of the reference."""
    B, T, prompts = 5, 6, (0, 3, 0, 1, 0)
    truth, model = build(case, "float64", "reference"), build(case, dtype)
    tokens, slots = torch.randint(case.config.vocab_size, (B, T)), torch.randperm(B + 2)[:B]
    whole, kv_cache, seen = truth.logits(tokens), model.kv_cache(B + 2, T), 0
    lengths = list(prompts)
    for i, count in enumerate(prompts):
        if count:
            model.logits(tokens[i : i + 1, :count], kv_cache=kv_cache.row(int(slots[i])))
    for step in range(T + B):
        running = [i for i in range(B) if i <= step and lengths[i] < T]
        if running:
            rows, at = torch.tensor(running), torch.tensor([lengths[i] for i in running])
            found = model.decode(tokens[rows, at], slots[rows], at, kv_cache)
            assert found.dtype == getattr(torch, dtype)
            assert distance(found, whole[rows, at]).largest < bound
            seen += len(running)
        for i in running:
            lengths[i] += 1
    assert seen == B * T - sum(prompts)


def filled(model: Transformer, slots: int, capacity: int) -> KVCache:
    kv_cache = model.kv_cache(slots, capacity)
    for stacks in kv_cache.stacked.values():
        for stack in stacks:
            stack.normal_()
    return kv_cache


@pytest.mark.parametrize("case", [CASES[0], CASES[-1]], ids=attrgetter("name"))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_is_its_own(case: ModelCase, dtype: str, monkeypatch: pytest.MonkeyPatch):
    """Bitwise what the sequence gives alone: with 1 to 17 rows and 64, any lengths, slots and order, a larger cache, and by one
    thread or two."""
    most, length = 64, case.config.max_seq_len - 3
    model = build(case, dtype)
    source = filled(model, most, length)
    tokens, lengths = torch.randint(case.config.vocab_size, (most,)), torch.randint(length, (most,))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = torch.cat(
        [model.decode(*(x[i : i + 1] for x in (tokens, torch.arange(most), lengths)), source) for i in range(most)]
    )
    monkeypatch.setattr(decode, "PER_THREAD", 1)
    try:
        for R in (*range(1, 18), most):
            for threads in (1, 2):
                torch.set_num_threads(threads)
                rows, slots = torch.randperm(most)[:R], torch.randperm(most + 3)[:R]
                kv_cache = filled(model, most + 3, length + 2)
                for name, stacks in source.stacked.items():
                    for stack, other in zip(stacks, kv_cache.stacked[name], strict=True):
                        other[:, slots, :, :length] = stack[:, rows]
                found = model.decode(tokens[rows], slots, lengths[rows], kv_cache)
                assert torch.equal(found, alone[rows]), f"{R} rows, {threads} threads"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_in_nan_out(dtype: str):
    """In one sequence's keys or values it reaches that sequence alone; what lies beyond a sequence's length reaches nobody."""
    model = build(CASES[-1], dtype)
    R, length = 6, 20
    kv_cache, rows = filled(model, R, length), torch.arange(R)
    kv_cache.stacked["keys"][0][0, 1, 2, 3] = torch.nan
    kv_cache.stacked["values"][0][1, 4, 0, 11] = torch.nan
    kv_cache.stacked["keys"][0][:, :, :, 13:] = torch.nan
    kv_cache.stacked["values"][0][:, :, :, 13:] = torch.nan
    found = model.decode(rows, rows, torch.full((R,), 12), kv_cache, check=False)
    assert found.isnan().any(1).tolist() == [i in (1, 4) for i in range(R)]
    assert found[[1, 4]].isnan().all()
