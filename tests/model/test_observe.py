"""The observer is called for every op, in order and with the layer it belongs to, and changes no result."""

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
def test_recomputed_ops_belong_to_their_block(recompute: str):
    seen = seen_by(Transformer(MODEL, ops="reference", recompute=recompute))
    assert {s.layer for s in seen if s.op in ("attention", "qkv_rope")} == {"blocks.0.attn", "blocks.1.attn"}


def test_the_head_of_a_tied_model_is_the_head():
    seen = seen_by(Transformer(replace(MODEL, tie_embeddings=True), ops="reference"))
    assert {s.layer for s in seen if s.op == "linear_cross_entropy"} == {"head"}
    assert {s.layer for s in seen if s.op == "embed"} == {"embed"}


def test_the_gradients_that_a_call_writes():
    model = Transformer(MODEL, ops="reference")
    written = [s.grads for s in seen_by(model) if s.direction == "backward" and s.op == "linear"]
    assert [tuple(dw.shape for dw in grads) for grads in written[:2]] == [((24, 8),), ((8, 8),)]


@pytest.mark.parametrize("ops", ["reference", "cpu"])
def test_observing_changes_no_result(ops: str):
    observed, model = Transformer(MODEL, ops=ops), Transformer(MODEL, ops=ops)
    own = observed.ops
    seen_by(observed)
    assert observed.ops is own
    tokens, targets = torch.randint(19, (2, 3, 6), generator=torch.Generator().manual_seed(0))
    model.forward_backward(tokens, targets)
    assert torch.equal(observed.store.flat_grads, model.store.flat_grads)


def test_bytes_moved_counts_each_tensor_once():
    calls = seen_by(Transformer(MODEL, ops="reference"))
    linear = next(call for call in calls if call.op == "linear" and call.direction == "forward")
    x, w, _ = linear.inputs
    assert linear.saved.x is x
    assert linear.bytes_moved == x.nbytes + w.nbytes + linear.outputs["y"].nbytes


def test_separate_gradients_are_observed():
    model, calls = Transformer(MODEL, ops="reference"), []
    x, dw = torch.ones(2, 8), model.grads["blocks.0.attn.wo"]
    w = model.params["blocks.0.attn.wo"]
    with observe_ops(model, calls.append):
        assert model.ops.linear.backward_dw is not None
        _, saved = model.ops.linear.forward(x, w, None)
        model.ops.linear.backward_dw(x, saved, w, None, dw, None)
    assert [(call.layer, call.direction, len(call.grads)) for call in calls] == [
        ("blocks.0.attn", "forward", 0),
        ("blocks.0.attn", "backward", 1),
    ]
