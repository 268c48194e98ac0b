"""A pass that is repeated equals one that is run, bit for bit, whatever the model and whatever happens in between."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tapeless.config import Lora, ModelConfig
from tapeless.errors import InputError, NonFiniteError
from tapeless.model.observe import observe_ops
from tapeless.model.replay import MAX_CAPTURED
from tapeless.model.transformer import Transformer
from tapeless.verify.fixtures import move_off_init

pytest.importorskip("numba")

LLAMA = ModelConfig(
    vocab_size=1000, hidden_dim=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=24, intermediate_dim=112, max_seq_len=96
)
BIASES = {"norm_bias": True, "attn_bias": True, "ffn_bias": True}
PENALTIES = {"z_loss": 0.01, "label_smoothing": 0.1, "logit_softcap": 5.0}
MODELS: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "llama-cheap": (LLAMA, {"recompute": "cheap"}),
    "gpt2": (replace(LLAMA, norm="layer", position="learned", ffn="gelu", tie_embeddings=True, **BIASES), {}),
    "qwen3": (replace(LLAMA, qk_norm=True, tie_embeddings=True, **PENALTIES), {"recompute": "cheap"}),
    "post": (replace(LLAMA, norm="layer", norm_placement="post", position="none", ffn="tanh"), {"recompute": "full"}),
    "post-none": (replace(LLAMA, norm_placement="post", ffn="relu2", qk_norm=True), {}),
    "full": (replace(LLAMA, ffn="geglu"), {"recompute": "full"}),
    "lora": (LLAMA, {"lora": Lora(3, 5.0, "wq,wv,w_up,wo"), "recompute": "cheap"}),
    "lora-all": (replace(LLAMA, **BIASES, norm="layer", ffn="relu"), {"lora": Lora(3, 2.0, "all-linear")}),
    "frozen": (LLAMA, {"freeze": "embed*,blocks.0.*,*_norm.w"}),
}
LARGE, TINY = (6, 96), (3, 7)  # buffers of the workspace, and of the C library


def batch(seed: int, shape: tuple[int, int], ignored: int = 5) -> tuple[Tensor, Tensor]:
    tokens, targets = torch.randint(1000, (2, *shape), generator=torch.Generator().manual_seed(seed))
    targets[0, :ignored] = -100
    return tokens, targets


def pair(config: ModelConfig, **options: Any) -> tuple[Transformer, Transformer]:
    """Two models alike, the second of which never records."""
    models = [Transformer(config, ops="cpu", **options) for _ in range(2)]
    for model in models:
        move_off_init(model, seed=0)
    models[1].ops = replace(models[1].ops, capture=None)
    return models[0], models[1]


@pytest.mark.parametrize("shape", [LARGE, TINY], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_every_pass_equals_one_that_is_run(name: str, dtype: str, shape: tuple[int, int]):
    config, options = MODELS[name]
    models = pair(config, dtype=dtype, **options)
    for step in range(5):
        for micro_batch in range(3):
            data = batch(10 * step + micro_batch, shape)
            losses = [model.forward_backward(*data, num_targets=400, accumulate=micro_batch > 0) for model in models]
            assert torch.equal(*losses)
            assert torch.equal(*(model.store.flat_grads for model in models))
        for model in models:
            model.store.flat.add_(model.store.flat.roll(step), alpha=1e-3)
    assert models[0]._captured.count == 2  # fresh and not
    assert models[1]._captured.count == 0


def captured(config: ModelConfig = LLAMA, shape: tuple[int, int] = LARGE, **options: Any) -> tuple[Transformer, Transformer]:
    models = pair(config, **options)
    for seed in range(3):
        for model in models:
            model.forward_backward(*batch(seed, shape), accumulate=False)
    assert models[0]._captured.count == 1
    return models


def same(models: tuple[Transformer, Transformer], data: tuple[Tensor, Tensor]) -> None:
    losses = [model.forward_backward(*data, accumulate=False) for model in models]
    assert torch.equal(*losses)
    assert torch.equal(*(model.store.flat_grads for model in models))


def test_what_lies_between_does_not_matter():
    """Evaluations, passes of another shape, and of another number of threads; a batch that is a view with gaps."""
    models, threads = captured(), torch.get_num_threads()
    for seed in range(9):
        for model in models:
            model.loss(*batch(seed, (2, 96)))
            model.logits(batch(seed, (5, 64))[0])
        same(models, batch(seed, LARGE))
        same(models, batch(seed, TINY))
        same(models, tuple(x.T.contiguous().T for x in batch(seed, LARGE)))  # type: ignore[arg-type]
    try:
        for count in (1, threads + 1, threads):
            torch.set_num_threads(count)
            for seed in range(3):
                same(models, batch(seed, LARGE))
    finally:
        torch.set_num_threads(threads)


def test_a_loss_that_somebody_keeps_stays():
    model, _ = captured()
    losses = [model.forward_backward(*batch(seed, LARGE), accumulate=False) for seed in range(3)]
    assert len({float(loss) for loss in losses}) == 3


def test_a_tensor_that_somebody_keeps_is_not_written_over():
    models = pair(LLAMA)
    held = [models[0].logits(batch(0, LARGE)[0])]
    before = [held[0].clone()]
    for seed in range(4):
        models[0].forward_backward(*batch(seed, LARGE), accumulate=False)
        held.append(models[0].logits(batch(seed, LARGE)[0]))
        before.append(held[-1].clone())
    assert models[0]._captured.count == 1
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))


def test_memory_does_not_grow():
    model, _ = captured()
    ws = model.ops.linear.forward.keywords["ws"]  # type: ignore[attr-defined]
    model.loss(*batch(0, LARGE))
    before = ws.allocated
    for seed in range(20):
        model.forward_backward(*batch(seed, LARGE), accumulate=False)
        model.loss(*batch(seed, LARGE))
    assert ws.allocated == before


def test_there_are_never_many():
    model = Transformer(LLAMA, ops="cpu")
    for length in range(4, 4 + 2 * MAX_CAPTURED):
        for seed in range(3):
            model.forward_backward(*batch(seed, (2, length), ignored=1))
    assert model._captured.count == MAX_CAPTURED


def test_another_number_of_targets_is_another_pass():
    models = captured()
    for ignored in (5, 6, 7, 6, 6, 6, 5, 7):
        same(models, batch(ignored, LARGE, ignored))
    for number in (100, 200, 100, 100, 200, 200):
        losses = [model.forward_backward(*batch(1, LARGE), num_targets=number) for model in models]
        assert torch.equal(*losses)


@pytest.mark.parametrize(("which", "bad"), [(0, 1000), (0, -1), (1, 1000), (1, -5)])
def test_bad_ids_are_refused(which: int, bad: int):
    models, data = captured(), batch(0, LARGE)
    data[which][2, 3] = bad
    with pytest.raises(InputError, match=r"\[2, 3\]"):
        models[0].forward_backward(*data, accumulate=False)
    same(models, batch(1, LARGE))


@pytest.mark.parametrize("ignored", [False, True])
def test_a_broken_parameter_is_named(ignored: bool):
    model, _ = captured()
    data = batch(0, LARGE)
    if ignored:
        data[1].fill_(-100)
        for _ in range(3):
            model.forward_backward(*data, accumulate=False)
        assert model._captured.count == 2
    model.params["blocks.2.ffn.w_down"][3, 4] = torch.nan
    with pytest.raises(NonFiniteError, match=r"blocks.2.ffn.w_down.*\[3, 4\]"):
        model.forward_backward(*data, accumulate=False)


def test_what_depends_on_more_than_its_tokens_is_run():
    tokens, targets = batch(0, LARGE)
    told: list[str] = []
    model = Transformer(LLAMA, ops="cpu")
    dropped = Transformer(replace(LLAMA, dropout=0.1), ops="cpu")
    with observe_ops(model, lambda seen: told.append(seen.op)):
        for _ in range(3):
            model.forward_backward(tokens, targets)
    assert told.count("attention") == 3 * 2 * LLAMA.num_layers
    for step in range(3):
        model.forward_backward(tokens, targets, documents=tokens // 500)
        model.forward_backward(tokens, targets, on_grads_ready=lambda grads: None)
        dropped.forward_backward(tokens, targets, step=step)
    assert model._captured.count == dropped._captured.count == 0


def test_a_model_of_large_buffers_shares_them(monkeypatch: pytest.MonkeyPatch):
    models = pair(LLAMA)
    monkeypatch.setitem(models[0].ops.capture.__globals__, "LARGEST_CAPTURE", 2**20)  # type: ignore[union-attr]
    for seed in range(4):
        same(models, batch(seed, LARGE))
        for model in models:
            model.loss(*batch(seed, (1, 50 + seed)))
    assert models[0]._captured.count == 0
    for seed in range(3):
        same(models, batch(seed, TINY))  # what was refused does not stand in the way of others
    assert models[0]._captured.count == 1


def test_a_repeated_pass_runs_no_python(monkeypatch: pytest.MonkeyPatch):
    model, other = captured()
    expected = other.forward_backward(*batch(9, LARGE), accumulate=False)

    def refuse(*args: Any) -> None:
        raise AssertionError("this is Python")

    monkeypatch.setattr(model, "_forward_backward", refuse)
    assert torch.equal(model.forward_backward(*batch(9, LARGE), accumulate=False), expected)


@pytest.mark.parametrize("name", ["qwen3", "lora"])
def test_in_inference_mode_every_pass_is_run(name: str):
    config, options = MODELS[name]
    models = pair(config, **options)
    for seed in range(4):
        with torch.inference_mode():
            same(models, batch(seed, LARGE))
    assert models[0]._captured.count == 0
    for seed in range(3):
        same(models, batch(seed, LARGE))
    assert models[0]._captured.count == 1
    with torch.inference_mode():
        same(models, batch(5, LARGE))


def test_without_checks_and_with_a_number_that_is_a_tensor():
    models, number = pair(LLAMA), torch.tensor(400)
    threads = torch.get_num_threads()
    try:
        for seed, count in enumerate((100, 100, 100, 200, 100, 200, 200)):
            number.fill_(count)
            torch.set_num_threads(1 + seed % 2)
            losses = [float(model.forward_backward(*batch(seed, LARGE), num_targets=number, check=False)) for model in models]
            assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_optimizer_that_nobody_knows(dtype: str):
    """It writes the parameters, and not the copy that products read."""
    models = pair(LLAMA, dtype=dtype)
    for seed in range(5):
        same(models, batch(seed, LARGE))
        for model in models:
            model.store.flat.data[: model.store.flat_grads.numel()].sub_(model.store.flat_grads, alpha=0.1)
    assert models[0]._captured.count == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("documents", [False, True])
def test_a_captured_evaluation_equals_one_that_is_run(dtype: str, documents: bool):
    models = pair(LLAMA, dtype=dtype)
    for seed in range(6):
        tokens, targets = batch(seed, LARGE, ignored=seed)
        options = {"documents": (torch.arange(96) // (5 + seed)).repeat(6, 1)} if documents else {}
        assert torch.equal(*(model.loss(tokens, targets, num_targets=1, **options) for model in models))
        for model in models:
            model.loss(tokens, targets)  # reads the number of its targets
            model.forward_backward(tokens, targets)
            model.store.flat.mul_(0.99)
    assert models[0]._captured_losses.count == 1
    models[0].params["blocks.2.ffn.w_down"][3, 4] = torch.nan
    with pytest.raises(NonFiniteError, match=r"blocks.2.ffn.w_down.*\[3, 4\]"):
        models[0].loss(*batch(0, LARGE), num_targets=1)
