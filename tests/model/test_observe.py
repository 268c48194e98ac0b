"""Watching: every call is told in order, by the layer it belongs to, and nothing is computed otherwise."""

from dataclasses import replace

import pytest
import torch

from tapeless.config import ModelConfig
from tapeless.model.observe import OpCall, observe_ops
from tapeless.model.transformer import Transformer

MODEL = ModelConfig(vocab_size=19, hidden_dim=8, num_layers=2, num_heads=2, intermediate_dim=12, max_seq_len=6)
FORWARD = ["attn_norm add_norm", "attn linear", "attn qkv_rope", "attn attention", "attn linear"]
FORWARD += ["ffn_norm add_norm", "ffn linear", "ffn ffn_down"]
BACKWARD = ["ffn ffn_down", "ffn linear", "ffn_norm add_norm", "attn linear", "attn attention", "attn qkv_rope"]
BACKWARD += ["attn linear", "attn_norm add_norm"]


def seen_by(model: Transformer) -> list[OpCall]:
    seen: list[OpCall] = []
    tokens, targets = torch.randint(19, (2, 3, 6), generator=torch.Generator().manual_seed(0))
    model.zero_grads()
    with observe_ops(model, seen.append):
        model.forward_backward(tokens, targets)
    return seen


@pytest.mark.parametrize("ops", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_call_in_order_with_its_layer(ops: str, dtype: str):
    seen = seen_by(Transformer(MODEL, ops=ops, dtype=dtype))
    forward = [f"{s.layer} {s.op}" for s in seen if s.direction == "forward" and s.layer != "head"]
    backward = [f"{s.layer} {s.op}" for s in seen if s.direction == "backward" and s.layer != "head"]
    blocks = [[f"blocks.{i}.{call}" for call in FORWARD] for i in (0, 1)]
    assert forward == ["embed embed", *blocks[0], *blocks[1], "final_norm add_norm"]
    back = [[f"blocks.{i}.{call}" for call in BACKWARD] for i in (1, 0)]
    assert backward == ["final_norm add_norm", *back[0], *back[1], "embed embed"]
    assert {s.op for s in seen if s.layer == "head"} == {"linear_cross_entropy"}


@pytest.mark.parametrize("recompute", ["cheap", "full"])
def test_what_is_computed_again_belongs_to_its_block(recompute: str):
    seen = seen_by(Transformer(MODEL, ops="reference", recompute=recompute))
    assert {s.layer for s in seen if s.op in ("attention", "qkv_rope")} == {"blocks.0.attn", "blocks.1.attn"}


def test_the_head_of_a_tied_model_is_the_head():
    seen = seen_by(Transformer(replace(MODEL, tie_embeddings=True), ops="reference"))
    assert {s.layer for s in seen if s.op == "linear_cross_entropy"} == {"head"}
    assert {s.layer for s in seen if s.op == "embed"} == {"embed"}


def test_the_gradients_that_a_call_writes_are_told():
    model = Transformer(MODEL, ops="reference")
    written = [s.grads for s in seen_by(model) if s.direction == "backward" and s.op == "linear"]
    assert [tuple(dw.shape for dw in grads) for grads in written[:2]] == [((24, 8),), ((8, 8),)]


@pytest.mark.parametrize("ops", ["reference", "cpu"])
def test_nothing_is_computed_otherwise(ops: str):
    watched_model, model = Transformer(MODEL, ops=ops), Transformer(MODEL, ops=ops)
    healthy = watched_model.ops
    seen_by(watched_model)
    assert watched_model.ops is healthy
    tokens, targets = torch.randint(19, (2, 3, 6), generator=torch.Generator().manual_seed(0))
    model.forward_backward(tokens, targets)
    assert torch.equal(watched_model.store.flat_grads, model.store.flat_grads)
