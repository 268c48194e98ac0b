"""The identities: every healthy model keeps them, a broken op does not, and looking changes nothing of what is trained."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_fixtures import MODEL as SMALL
from run_fixtures import begin_run, config, dataset, events, final_bytes, play
from torch import Tensor

from tapeless.cli.main import main
from tapeless.config import ModelConfig, SimpleLMConfig
from tapeless.errors import InvariantError
from tapeless.model.build import build_model
from tapeless.model.transformer import Transformer
from tapeless.ops.op import Op, OpSet
from tapeless.training.invariants import check_invariants, identities
from tapeless.training.trainer import Trainer

V, T = 19, 6
RMS = ModelConfig(vocab_size=V, hidden_dim=8, num_layers=2, num_heads=2, intermediate_dim=12, max_seq_len=T)
LAYER = replace(RMS, norm="layer", norm_bias=True, tie_embeddings=True)
MODELS = {
    "rms": RMS,
    "layer, tied": LAYER,
    "post": replace(LAYER, norm_placement="post", tie_embeddings=False, position="none"),
    "qk_norm": replace(RMS, qk_norm=True, num_kv_heads=1),
    "learned": replace(RMS, position="learned", dropout=0.2),
    "penalties": replace(RMS, z_loss=1e-3, logit_softcap=5.0, label_smoothing=0.1),
}


def batch() -> tuple[Tensor, Tensor]:
    tokens, targets = torch.randint(V, (2, 3, T), generator=torch.Generator().manual_seed(0))
    targets[0, :2] = -100
    return tokens, targets


def made(config: ModelConfig, **options: Any) -> Transformer:
    model = build_model(config, **options)
    assert isinstance(model, Transformer)
    model.store.flat.add_(0.1 * torch.randn(model.store.flat.shape, generator=torch.Generator().manual_seed(1)))
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", MODELS)
def test_a_healthy_model_keeps_them(name: str, dtype: str):
    found = list(identities(made(MODELS[name], dtype=dtype, ops="reference"), *batch(), step=3, first_sample=0))
    assert [each for each in found if not each.error <= each.bound] == []
    assert {each.layer for each in found} >= {"head", "blocks.0.attn_norm", "blocks.1.ffn_norm", "blocks.0.attn", "the model"}


def test_so_do_the_kernels():
    check_invariants(made(RMS, ops="cpu"), *batch(), step=0, first_sample=0)


@pytest.mark.parametrize("ops", ["reference", "cpu"])
def test_documents_that_are_kept_apart_do_not_see_each_other(ops: str):
    model, (tokens, targets) = made(RMS, ops=ops), batch()
    documents = (torch.arange(tokens.shape[1]) // 3).expand_as(tokens)
    check_invariants(model, tokens, targets, documents, step=0, first_sample=0)
    attention = model.ops.attention
    model.ops = replace(model.ops, attention=Op(lambda q, k, v, documents: attention.forward(q, k, v), attention.backward))
    with pytest.raises(InvariantError, match="logits do not depend on other documents"):
        check_invariants(model, tokens, targets, documents, step=0, first_sample=0)


def test_so_does_a_model_without_attention():
    model = build_model(SimpleLMConfig(vocab_size=V, hidden_dim=8, intermediate_dim=12))
    check_invariants(model, *batch(), step=0, first_sample=0)
    healthy = model.forward_backward

    def scattered(*args: Any, **options: Any) -> Tensor:
        loss = healthy(*args, **options)
        model.grads["embed.w"][:] += 1e-9
        return loss

    model.forward_backward = scattered  # type: ignore[method-assign]
    with pytest.raises(InvariantError, match="unused rows have zero gradient"):
        check_invariants(model, *batch(), step=0, first_sample=0)


def altered(op: Op, forward: Callable[..., Any] | None = None, backward: Callable[..., Any] | None = None) -> Op:
    """The op with what it returns changed."""
    return Op(
        (lambda *a, **o: forward(op.forward(*a, **o))) if forward else op.forward,
        (lambda *a, **o: backward(op.backward(*a, **o), a)) if backward else op.backward,
    )


def leaning(dx: Tensor, args: tuple[Any, ...]) -> Tensor:
    """A norm's backward without the term that takes out the part along its input."""
    saved = args[2].norm
    return dx + 0.01 * saved.x


def shifted(dx: Tensor, args: tuple[Any, ...]) -> Tensor:
    return dx + 0.01 * dx.abs().max()


def one_logit_too_much(dx: Tensor, args: tuple[Any, ...]) -> Tensor:
    args[3][5] += 0.01 * args[3].abs().max()  # (dloss, saved, w, dw)
    return dx


def ignored_too(dx: Tensor, args: tuple[Any, ...]) -> Tensor:
    return dx + 1e-7


def longer(results: Any) -> Any:
    q, k, v, saved = results
    return q, 1.001 * k, v, saved


def other_values(results: Any) -> Any:
    q, k, v, saved = results
    return q, k, v * (1 + 1e-6), saved


def from_the_future(results: Any) -> Any:
    o, saved = results
    return o + 1e-6 * o.mean(1, keepdim=True), saved


def every_row(nothing: None, args: tuple[Any, ...]) -> None:
    args[3][:] += 1e-9  # (dy, saved, w, dw)


def broken(ops: OpSet, fault: str) -> OpSet:
    rms, layer = ops.add_norm["rms"], ops.add_norm["layer"]
    head, heads = ops.linear_cross_entropy, ops.qkv_rope
    return {
        "leaning": lambda: replace(ops, add_norm={"rms": altered(rms, backward=leaning)}),
        "shifted": lambda: replace(ops, add_norm={"layer": altered(layer, backward=shifted)}),
        "one logit": lambda: replace(ops, linear_cross_entropy=altered(head, backward=one_logit_too_much)),
        "ignored": lambda: replace(ops, linear_cross_entropy=altered(head, backward=ignored_too)),
        "longer": lambda: replace(ops, qkv_rope=altered(heads, forward=longer)),
        "values": lambda: replace(ops, qkv_rope=altered(heads, forward=other_values)),
        "future": lambda: replace(ops, attention=altered(ops.attention, forward=from_the_future)),
        "rows": lambda: replace(ops, embed=altered(ops.embed, backward=every_row)),
    }[fault]()


FAULTS = {
    "leaning": (RMS, r"<x, dx> = 0 of a norm does not hold in final_norm"),
    "shifted": (LAYER, r"of LayerNorm does not hold|<x, dx> = 0 of a norm does not hold"),
    "one logit": (RMS, r"sum of dw over V = 0 does not hold in head"),
    "ignored": (LAYER, r"dx = 0 of ignored targets does not hold in head"),
    "longer": (RMS, r"the rotation preserves the length of k does not hold in blocks\.0\.attn"),
    "values": (LAYER, r"v is the output of the projection does not hold in blocks\.0\.attn"),
    "future": (RMS, r"logits do not depend on later tokens does not hold"),
    "rows": (RMS, r"unused rows have zero gradient does not hold in embed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_op_is_found(fault: str):
    config, says = FAULTS[fault]
    model = made(config, ops="reference")
    model.ops = broken(model.ops, fault)
    with pytest.raises(InvariantError, match=rf"^step 8: .*{says}.*nothing was updated"):
        check_invariants(model, *batch(), step=7, first_sample=0)


def test_looking_changes_nothing(tmp_path: Path):
    plain, looked_at = (
        begin_run(tmp_path / name, config(check_invariants_every=n, grad_accum=2)) for name, n in (("a", 0), ("b", 3))
    )
    for run in (plain, looked_at):
        play(run)
    assert final_bytes(plain) == final_bytes(looked_at)
    assert events(plain) == events(looked_at)


def test_it_is_looked_at_every_n_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    steps: list[int] = []
    monkeypatch.setattr("tapeless.training.trainer.check_invariants", lambda *a, step, **o: steps.append(step + 1))
    Trainer(build_model(SMALL), config(check_invariants_every=5), dataset(tmp_path)).run()
    assert steps == [5, 10]


def test_the_command_ends_with_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    run = begin_run(tmp_path / "run", config())
    monkeypatch.setattr("tapeless.training.invariants.IDENTITY", {"float32": -math.inf})
    assert main(["train", "resume", str(run.path), "--override", "check_invariants_every=4"]) == 3
    assert capsys.readouterr().err.splitlines()[-1].startswith("error[INVARIANT]: step 4: ")
    assert [event["step"] for event in events(run, ["step"])] == [1, 2, 3]
