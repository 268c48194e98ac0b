"""The captured step. What it does is one function without a look at any value, which runs here in Triton's interpreter; that it
can be captured, and that a replay does the same, takes a GPU (tests/kernels/triton/test_cuda.py)."""

import logging
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled here, not interpreted: tests/kernels/triton/test_cuda.py", allow_module_level=True)

from tapeless.config import ModelConfig, TrainConfig
from tapeless.errors import InputError, NonFiniteError
from tapeless.kernels import choose
from tapeless.kernels.triton.ops import triton_ops
from tapeless.model.transformer import Transformer
from tapeless.training.captured_step import CapturedStep, captured_step
from tapeless.training.layer_stats import LayerStats
from tapeless.training.step import optimizer_of, train_step

CONFIG = ModelConfig(vocab_size=31, hidden_dim=16, num_layers=1, num_heads=2, intermediate_dim=20, max_seq_len=8)
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _triton_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_BACKENDS", dict(choose._BACKENDS))
    choose._BACKENDS["interpreted"] = choose.Backend(lambda device: triton_ops(), ["cpu"], None)
    monkeypatch.setattr(CapturedStep, "_run", CapturedStep._step)


def batch(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = torch.randint(31, (2, rows, 6))
    targets[0, :2] = -100
    return tokens, targets


def graphed(**options: Any) -> CapturedStep:
    model = Transformer(CONFIG, ops="interpreted")
    train = TrainConfig(**options)
    optimizer = optimizer_of(model, train)
    return CapturedStep(model, optimizer, grad_clip=train.grad_clip, grad_accum=train.grad_accum)


@pytest.mark.parametrize("options", [{}, {"grad_accum": 2}, {"grad_clip": 0.01}, {"grad_clip": 0.0}], ids=str)
def test_equals_the_step_of_plain_calls(options: dict[str, Any]):
    train, step = TrainConfig(**options), graphed(**options)
    model = Transformer(CONFIG, ops="reference")
    optimizer = optimizer_of(model, train)
    for i in range(3):
        torch.manual_seed(i)
        data = batch()
        found = step(*data, lr=1e-2 * (i + 1), step=i)
        limits = {"grad_clip": train.grad_clip, "grad_accum": train.grad_accum}
        expected = train_step(model, optimizer, *data, lr=1e-2 * (i + 1), step=i, first_sample=0, **limits)
        assert found == pytest.approx(expected, rel=1e-5)
    moved = model.store.flat - Transformer(CONFIG).store.flat
    assert (step.model.store.flat - model.store.flat).norm() <= 1e-3 * moved.norm()
    assert step.optimizer.t == optimizer.t == 3


def state(step: CapturedStep) -> list[torch.Tensor]:
    return [step.model.store.flat.clone(), *(x.clone() for x in step.optimizer.state.values())]


@pytest.mark.parametrize("grad_clip", [0.0, 0.01])
def test_it_leaves_what_a_look_at_the_layers_needs(grad_clip: float):
    """The gradients lie where they were, and the weights are those after the step."""
    step, data = graphed(grad_clip=grad_clip), batch()
    look, before = LayerStats(step.model, 1), step.model.store.flat.clone()
    look.before()
    result = step(*data, lr=1e-2, step=0)
    found = look.after(result.grad_norm)
    assert math.hypot(*found["grad_norm"].values()) == pytest.approx(result.grad_norm, rel=1e-6)
    assert found["grad_norm"]["head"] == pytest.approx(float(step.model.grads["head.w"].norm()), rel=1e-5)
    stretch = step.model.store.layout.spans["head.w"]
    old, new = (flat[stretch[0] :][: stretch[1]] for flat in (before, step.model.store.flat))
    assert found["update_ratio"]["head"] == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-5)


@pytest.mark.parametrize(("which", "bad"), [(0, 31), (0, -1), (1, 31), (1, -5)])
def test_an_id_outside_the_vocabulary_updates_nothing(which: int, bad: int):
    step, data = graphed(), batch()
    step(*data, lr=1e-2, step=0)
    before = state(step)
    data[which][1, 3] = bad
    with pytest.raises(InputError, match="step 2: an id is outside the vocabulary of 31; nothing was updated"):
        step(*data, lr=1e-2, step=1)
    assert all(torch.equal(a, b) for a, b in zip(before, state(step), strict=True))
    assert step.optimizer.t == 1


def test_shapes_are_checked_before_anything_runs():
    step, (tokens, targets) = graphed(), batch()
    for bad in ((tokens, targets[:, :1]), (tokens[:0], targets[:0]), (tokens.int(), targets), (tokens[0], targets[0])):
        with pytest.raises(InputError):
            step(*bad, lr=1e-2, step=0)


def test_a_broken_parameter_is_named_and_updates_nothing():
    step = graphed()
    step.model.params["blocks.0.ffn.w_down"][3, 4] = torch.nan
    before = state(step)
    with pytest.raises(NonFiniteError, match=r"w_down.*\[3, 4\]"):
        step(*batch(), lr=1e-2, step=0)
    assert all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(before, state(step), strict=True))


def test_a_write_in_between_is_seen():
    step, data = graphed(), batch()
    first = step(*data, lr=0.0, step=0).loss
    step.model.params["embed.w"].mul_(3)
    assert step(*data, lr=0.0, step=1).loss != first


def test_where_it_cannot_be_it_says_why(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    train = TrainConfig()
    model = Transformer(CONFIG, ops="interpreted")
    assert captured_step(model, optimizer_of(model, train), train) is None  # a CPU has no graphs, and nobody expects one
    cases = {
        "synchronize within a step": (Transformer(CONFIG, ops="reference"), train),
        "a step of SGD cannot be captured": (model, replace(train, optimizer="sgd")),
        "a step of Muon cannot be captured": (model, replace(train, optimizer="muon")),
        "dropout masks": (Transformer(replace(CONFIG, dropout=0.1), ops="interpreted"), train),
    }
    for reason, (each, config) in cases.items():
        optimizer = optimizer_of(each, config)
        monkeypatch.setattr(each, "device", torch.device("cuda"))
        with caplog.at_level(logging.WARNING, "tapeless"):
            assert captured_step(each, optimizer, config) is None
        assert reason in caplog.messages[-1]


def test_a_loss_above_its_limit_updates_nothing_and_the_next_step_goes_on():
    step, data = graphed(), batch()
    step(*data, lr=1e-2, step=0)
    before = state(step)
    result = step(*data, lr=1e-2, step=1, loss_limit=1.0)
    assert result.skipped
    assert result.loss > 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, state(step), strict=True))
    assert step.optimizer.t == 1
    assert not step(*data, lr=1e-2, step=2, loss_limit=100.0).skipped
    assert not torch.equal(before[0], step.model.store.flat)
    assert step.optimizer.t == 2
