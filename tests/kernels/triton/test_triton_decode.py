"""A decode step in Triton equals the full forward, and a row has the same bits in any company."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("in the interpreter; test_cuda.py tests the same on a GPU", allow_module_level=True)

from triton.runtime import interpreter

from tapeless.kernels.triton import decode
from tapeless.model.cache import KVCache
from tapeless.model.transformer import Transformer
from tapeless.ops.softcap import SOFTCAP
from tapeless.verify.finding import distance
from tapeless.verify.fixtures import TRANSFORMER_CASES, ModelCase, T, V, batch, build
from tapeless.verify.tolerances import OP_FLOAT32

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # the interpreter, of loop bounds
CASES = [pytest.param(case, id=case.name) for case in TRANSFORMER_CASES]
GROUPED = TRANSFORMER_CASES[0]._replace(config=replace(TRANSFORMER_CASES[0].config, num_layers=1))


@pytest.fixture(autouse=True)
def _one_order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's matmul in float32 gives a row other bits when other rows change; rounded from float64 it does not."""

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        wide = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(np.float32)
        return interpreter.TensorHandle(wide + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def step(model: Transformer, tokens: Tensor, slots: Tensor, positions: Tensor, kv_cache: KVCache) -> Tensor:  # (R,) -> (R, V)
    run = decode.decoder(model.config, model.store.layout.spans, model.store.compute_flat)
    assert run is not None
    logits, cap = run(tokens, slots, positions, kv_cache), model.config.logit_softcap
    return SOFTCAP.forward(logits, cap=cap)[0] if cap else logits


def unwritten(model: Transformer, slots: int, capacity: int) -> KVCache:
    """A cache that shows when a position is read before it is written."""
    kv_cache = model.kv_cache(slots, capacity)
    for name in ("keys", "values"):
        kv_cache.stacked[name][0].fill_(torch.nan)
    return kv_cache


def in_one_step(model: Transformer, kv_cache: KVCache, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, V)
    """All tokens of all sequences as rows of one step, shuffled; sequence i in slot i."""
    (B, T), order = tokens.shape, torch.randperm(tokens.numel())
    rows = torch.cartesian_prod(torch.arange(B), torch.arange(T))[order]  # its columns have strides
    logits = torch.empty(B * T, V)
    logits[order] = step(model, tokens.reshape(-1)[order], *rows.t(), kv_cache)
    return logits.view(B, T, V)


@pytest.mark.parametrize("case", CASES)
def test_prompts_and_single_tokens(case: ModelCase):
    model, tokens = build(case, "float32"), batch()[0][:2, :4]
    kv_cache = unwritten(model, 2, 5)
    expected = in_one_step(model, kv_cache, tokens)
    assert distance(expected, model.logits(tokens)).largest <= OP_FLOAT32
    for name in ("keys", "values"):
        kv_cache.stacked[name][0][:, :, :, 3:] = torch.nan
    last = step(model, tokens[[1, 0], 3], torch.tensor([1, 0]), torch.tensor([3, 3]), kv_cache)
    assert last.equal(expected[[1, 0], 3])


def test_more_rows_than_a_program_has(monkeypatch: pytest.MonkeyPatch):
    model, tokens = build(GROUPED, "float32"), batch()[0]
    expected = in_one_step(model, unwritten(model, 2, T), tokens[:2])
    assert in_one_step(model, unwritten(model, 3, T), tokens)[:2].equal(expected)
    monkeypatch.setattr(decode, "ROWS", 16)  # two programs instead of one
    assert in_one_step(model, unwritten(model, 3, T), tokens)[:2].equal(expected)


def test_keys_are_split_by_position(monkeypatch: pytest.MonkeyPatch):
    """A longer cache has more splits, and the same bits."""
    model, tokens = build(GROUPED, "float32"), batch()[0][:1]
    monkeypatch.setattr(decode, "KEYS", 2)
    monkeypatch.setattr(decode, "SPLIT", T + 1)
    expected = in_one_step(model, unwritten(model, 1, T + 1), tokens)
    assert in_one_step(model, unwritten(model, 1, T + 2), tokens).equal(expected)
    monkeypatch.setattr(decode, "SPLIT", 4)
    assert distance(in_one_step(model, unwritten(model, 1, T + 1), tokens), model.logits(tokens)).largest <= OP_FLOAT32


def test_a_token_that_does_not_exist_reads_nothing():
    model = build(GROUPED, "float32")
    logits = step(model, torch.tensor([-1, V, 3]), torch.arange(3), torch.zeros(3, dtype=torch.int64), unwritten(model, 3, 2))
    assert logits[0].equal(logits[1])
    assert not logits[0].equal(logits[2])
