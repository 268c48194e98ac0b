"""NaN planted in a weight, in an embedding row of the batch, in an op's gradient, in memory: nothing is updated, and the right
tensor is named, on the console and in the dump; the run can go on."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_fixtures import MODEL, begin_run, config, dataset, final_bytes, play

from tapeless.config import SimpleLMConfig
from tapeless.errors import NonFiniteError
from tapeless.model.build import AnyModel, build_model
from tapeless.model.transformer import Transformer
from tapeless.ops.op import Op
from tapeless.training.trainer import Trainer

Plant = Callable[[Transformer], None]


def refused(trainer: Trainer) -> str:
    """The error of the next step, which must leave everything as it was."""
    held = [trainer.model.store.flat, *trainer.optimizer.state.values()]
    before = [x.clone() for x in held]
    with pytest.raises(NonFiniteError) as caught:
        trainer.step(*trainer.next_batch())
    assert all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(before, held, strict=True))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def a_trainer(tmp_path: Path, model: AnyModel | None = None, **changes: Any) -> Trainer:
    return Trainer(model or build_model(MODEL), config(**changes), dataset(tmp_path))


@pytest.mark.parametrize("ops", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("blocks.0.attn.wk", "blocks.0.attn linear forward, y"),
        ("blocks.1.attn_norm.w", "blocks.1.attn_norm add_norm forward, n"),
        ("blocks.1.ffn.w_down", "blocks.1.ffn ffn_down forward, y"),
        ("head.w", "head linear_cross_entropy "),
    ],
)
def test_a_bad_weight_is_named_with_the_op_that_shows_it(tmp_path: Path, ops: str, name: str, shown: str):
    trainer = a_trainer(tmp_path, build_model(MODEL, ops=ops))
    trainer.step(*trainer.next_batch())
    w = trainer.model.params[name]
    place = tuple(n - 1 for n in w.shape)
    w[place] = math.nan
    said = refused(trainer)
    assert said.startswith("step 2: ")
    assert f"first bad tensor: parameter {name}{list(place)} = nan in {name.rpartition('.')[0]} (first shown by {shown}" in said
    assert "batch: samples 2 to 3" in said
    assert trainer.steps == trainer.optimizer.t == 1


def test_a_bad_embedding_row_that_the_batch_uses(tmp_path: Path):
    trainer = a_trainer(tmp_path)
    tokens, _ = trainer.next_batch()
    trainer.model.params["embed.w"][tokens[1, 4], 3] = math.inf
    said = refused(trainer)
    rows = (tokens == tokens[1, 4]).nonzero()[0].tolist()  # where the batch uses it first
    assert f"parameter embed.w[{tokens[1, 4]}, 3] = inf in embed (first shown by embed embed forward, y{[*rows, 3]})" in said


def broken(ops: Any, field: str, call: int) -> Any:
    """The set with one backward that, at its n-th call, hands back a NaN."""
    healthy, count = getattr(ops, field), 0

    def backward(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        results = healthy.backward(*args, **options)
        if count % MODEL.num_layers == call:
            (results[1] if isinstance(results, tuple) else results)[0, 0, 0, 0] = math.nan
        return results

    return replace(ops, non_accumulating=None, **{field: Op(healthy.forward, backward)})


@pytest.mark.parametrize(("call", "layer"), [(1, 1), (0, 0)])
def test_a_gradient_that_an_op_makes_bad_under_a_finite_loss(tmp_path: Path, call: int, layer: int):
    model = build_model(MODEL, ops="reference")
    assert isinstance(model, Transformer)
    model.ops = broken(model.ops, "attention", call)
    said = refused(a_trainer(tmp_path, model))
    assert f"first bad tensor: dk[0, 0, 0, 0] = nan in blocks.{layer}.attn, attention backward" in said
    assert "gradient norm nan" in said
    assert "loss 5." in said


@pytest.mark.parametrize("ops", ["reference", "cpu"])
def test_gradients_that_are_finite_and_whose_norm_is_not(tmp_path: Path, ops: str):
    """Then there is no bad tensor, and none is made up."""
    said = refused(a_trainer(tmp_path, build_model(replace(MODEL, z_loss=1e30), ops=ops)))
    assert "gradient norm inf" in said
    assert "first bad tensor: norm of all gradients = inf in the step" in said
    assert "each is finite, their squares are too large" in said
    assert "nan" not in said


def test_the_gradient_of_a_weight_that_an_op_leaves_bad(tmp_path: Path):
    """wq, wk and wv are handed over as one matrix, and told apart."""
    model = build_model(MODEL, ops="reference")
    assert isinstance(model, Transformer)
    healthy, wk = model.ops.linear, model.grads["blocks.1.attn.wk"]

    def backward(dy: Any, saved: Any, w: Any, b: Any, dw: Any, db: Any) -> Any:
        dx = healthy.backward(dy, saved, w, b, dw, db)
        if dw.data_ptr() == model.grads["blocks.1.attn.wq"].data_ptr():
            wk[2, 5] = -math.inf
        return dx

    model.ops = replace(model.ops, linear=Op(healthy.forward, backward))
    said = refused(a_trainer(tmp_path, model))
    assert "first bad tensor: gradient of blocks.1.attn.wk[2, 5] = -inf in blocks.1.attn, linear backward" in said


def once(model: Any, spoil: Callable[[], None]) -> None:
    healthy, done = model.forward_backward, []

    def spoilt(*args: Any, **options: Any) -> Any:
        loss = healthy(*args, **options)
        if not done:
            done.append(spoil())
        return loss

    model.forward_backward = spoilt


def test_a_fault_of_the_memory_is_named_though_it_does_not_come_again(tmp_path: Path):
    model = build_model(MODEL)
    once(model, lambda: model.grads["blocks.0.ffn.w_up"][3, 2].fill_(math.nan))
    said = refused(a_trainer(tmp_path, model, grad_accum=2))
    assert "first bad tensor: gradient of blocks.0.ffn.w_up[3, 2] = nan in blocks.0.ffn (computed again, every op" in said


def test_a_model_without_attention(tmp_path: Path):
    model = build_model(SimpleLMConfig(hidden_dim=8, intermediate_dim=12))
    trainer = a_trainer(tmp_path, model, seq_len=8)
    model.params["hidden.w"][1, 2] = math.nan
    assert "first bad tensor: parameter hidden.w[1, 2] = nan in hidden" in refused(trainer)
    model.params["hidden.w"][1, 2] = 0.0
    once(model, lambda: model.grads["hidden.b"][1].fill_(math.inf))
    assert "first bad tensor: gradient of hidden.b[1] = inf in hidden" in refused(trainer)


def test_the_dump_says_it_all_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    expected = begin_run(tmp_path / "healthy", config())
    play(expected)
    run = begin_run(tmp_path / "run", config())
    with monkeypatch.context() as patch:
        healthy = Trainer.next_batch

        def spoilt(self: Trainer) -> Any:
            if self.steps == 6:
                self.model.params["blocks.1.ffn.w_gate"][0, 1] = math.nan
            return healthy(self)

        patch.setattr(Trainer, "next_batch", spoilt)
        with pytest.raises(
            NonFiniteError, match=r"step-00000007\.json; resume .* tapeless train resume .*run; if it d"
        ) as caught:
            play(run)
    dump = json.loads((run.path / "dumps" / "step-00000007.json").read_text())
    assert dump["step"] == 7
    assert dump["samples"] == [12, 13]
    assert dump["first_bad_tensor"]["tensor"] == "parameter blocks.1.ffn.w_gate"
    assert dump["first_bad_tensor"]["layer"] == "blocks.1.ffn"
    assert dump["first_bad_tensor"]["element"] == [0, 1]
    assert "blocks.1.ffn linear forward" in dump["first_bad_tensor"]["note"]
    assert dump["error"] in str(caught.value)
    tokens = torch.tensor(dump["batch"]["tokens"])
    assert tokens.shape == torch.tensor(dump["batch"]["targets"]).shape == (2, 8)
    assert play(run, resume=True)[0] == "done"
    assert final_bytes(run) == final_bytes(expected)


def test_before_the_first_checkpoint_the_run_starts_again_with_a_smaller_rate(tmp_path: Path):
    run = begin_run(tmp_path / "run", config(lr=1e30, grad_clip=0.0, save_every=1000, eval_every=0))
    with pytest.raises(NonFiniteError, match=r"no checkpoint yet: start again at step 0, .* train resume .*run --lr 5e\+29$"):
        play(run)
