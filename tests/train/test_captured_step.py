"""The captured step. On a CPU it is compared with train_step, bit for bit. What a GPU does is one function that looks at no
value, and runs here in Triton's interpreter; that a graph can hold it takes a GPU (tests/kernels/triton/test_cuda.py)."""

import logging
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("numba")
pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled here, not interpreted: tests/kernels/triton/test_cuda.py", allow_module_level=True)

from tapeless.config import Lora, ModelConfig, TrainConfig
from tapeless.dist.gradient_sum import InPlace
from tapeless.dist.world import ALONE
from tapeless.errors import InputError, NonFiniteError
from tapeless.kernels import choose
from tapeless.kernels.triton.ops import triton_ops
from tapeless.model.observe import observe_ops
from tapeless.model.transformer import Transformer
from tapeless.optim import SGD
from tapeless.optim.flat import CapturableOptimizer, FlatOptimizer
from tapeless.training.captured_step import CapturedStep, captured_step
from tapeless.training.layer_stats import LayerStats
from tapeless.training.step import StepResult, optimizer_of, train_step

CONFIG = ModelConfig(vocab_size=31, hidden_dim=16, num_layers=1, num_heads=2, intermediate_dim=20, max_seq_len=8)
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _triton_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_BACKENDS", dict(choose._BACKENDS))
    ops = replace(triton_ops(), capture=lambda run: (run(), "there is no GPU"))
    choose._BACKENDS["interpreted"] = choose.Backend(lambda device: ops, ["cpu"], None)


def batch(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = torch.randint(31, (2, rows, 6))
    targets[0, :2] = -100
    return tokens, targets


def graphed(**options: Any) -> CapturedStep:
    """As on a GPU, where ids are not read before the step."""
    model = Transformer(CONFIG, ops="interpreted")
    train = TrainConfig(**options)
    optimizer = optimizer_of(model, train)
    assert isinstance(optimizer, CapturableOptimizer)
    step = CapturedStep(model, optimizer, InPlace(ALONE, train.grad_accum, model.store.flat_grads), grad_clip=train.grad_clip)
    step.checks_first = False
    return step


OPTIONS: list[dict[str, Any]] = [{}, {"grad_accum": 2}, {"grad_clip": 0.01}, {"grad_clip": 0.0}]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("options", [*OPTIONS, *({"optimizer": name} for name in ("sgd", "adam", "muon"))], ids=str)
def test_equals_the_step_of_plain_calls(options: dict[str, Any], documents: bool):
    train, step = TrainConfig(**options), graphed(**options)
    model = Transformer(CONFIG, ops="reference")
    optimizer = optimizer_of(model, train)
    for i in range(3):
        torch.manual_seed(i)
        data = (*batch(), (torch.arange(6) // (2 + i)).repeat(4, 1)) if documents else batch()
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


class Outside(FlatOptimizer):
    state_names = ()

    def __init__(self, *views: Any):
        super().__init__(*views, lr=0.1, weight_decay=0.0, decay=None)

    def _update(self) -> None:
        self.params.sub_(self.grads, alpha=self.lr)


def test_where_it_cannot_be_it_says_why(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    train = TrainConfig()
    model = Transformer(CONFIG, ops="interpreted")
    cases = {
        "synchronize within a step": (Transformer(CONFIG, ops="reference"), SGD),
        "a step of Outside cannot be captured": (model, Outside),
        "dropout masks": (Transformer(replace(CONFIG, dropout=0.1), ops="interpreted"), SGD),
    }
    for reason, (each, kind) in cases.items():
        optimizer = kind(each.params, each.grads)
        with caplog.at_level(logging.WARNING, "tapeless"):
            assert captured_step(each, optimizer, train) is None
            assert not caplog.messages  # nobody expects a graph on a CPU
            with monkeypatch.context() as on_a_gpu:
                on_a_gpu.setattr(each, "device", torch.device("cuda"))
                assert captured_step(each, optimizer, train) is None
        assert reason in caplog.messages[-1]
        caplog.clear()


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


LLAMA = ModelConfig(
    vocab_size=1000, hidden_dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=24, intermediate_dim=112, max_seq_len=96
)


class Pair:
    """Two models alike on the CPU's kernels: one takes captured steps, the other those of train_step."""

    def __init__(self, *, grad_accum: int = 1, **options: Any):
        self.train = TrainConfig(grad_accum=grad_accum, grad_clip=0.5)
        self.models = [Transformer(LLAMA, ops="cpu", **options) for _ in range(2)]
        self.optimizers = [optimizer_of(model, self.train) for model in self.models]
        step = captured_step(self.models[0], self.optimizers[0], self.train)
        assert step is not None
        self.step, self.taken = step, 0

    def data(self, shape: tuple[int, int] = (6, 96), *, documents: bool = False) -> tuple[torch.Tensor, ...]:
        """Another one each time, with another number of targets."""
        tokens, targets = torch.randint(1000, (2, *shape), generator=torch.Generator().manual_seed(self.taken))
        targets[0, : self.taken % shape[1]] = -100
        ids = ((torch.arange(shape[1]) + self.taken) // 5).repeat(shape[0], 1)
        return (tokens, targets, ids) if documents else (tokens, targets)

    def plain(self, *data: torch.Tensor, loss_limit: float = math.inf) -> StepResult:
        options: dict[str, Any] = {"grad_clip": self.train.grad_clip, "grad_accum": self.train.grad_accum, "first_sample": 0}
        lr = 1e-3 * (1 + self.taken)
        return train_step(self.models[1], self.optimizers[1], *data, lr=lr, step=self.taken, loss_limit=loss_limit, **options)

    def captured(self, *data: torch.Tensor, loss_limit: float = math.inf) -> StepResult:
        return self.step(*data, lr=1e-3 * (1 + self.taken), step=self.taken, loss_limit=loss_limit)

    def take(self, *data: torch.Tensor, loss_limit: float = math.inf) -> StepResult:
        result = self.captured(*data, loss_limit=loss_limit)
        assert result == self.plain(*data, loss_limit=loss_limit)
        self.assert_equal()
        self.taken += 1
        return result

    def assert_equal(self) -> None:
        for name in ("flat", "compute_flat"):
            assert torch.equal(*(getattr(model.store, name) for model in self.models))
        for moments in zip(*(optimizer.state.values() for optimizer in self.optimizers), strict=True):
            assert torch.equal(*moments)
        assert self.optimizers[0].t == self.optimizers[1].t


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("shape", [(6, 96), (6, 7), (6, 1)], ids=str)
@pytest.mark.parametrize("grad_accum", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_cpu_every_bit_is_that_of_the_plain_step(dtype: str, grad_accum: int, shape: tuple[int, int], documents: bool):
    """Steps that run, are captured and are replayed, one of them a spike."""
    pair = Pair(dtype=dtype, grad_accum=grad_accum)
    for limit in (math.inf, math.inf, math.inf, 0.1, math.inf):
        assert pair.take(*pair.data(shape, documents=documents), loss_limit=limit).skipped == (limit < 1)
    assert pair.step._captured.count == 1


OTHERS: list[dict[str, Any]] = [{"lora": Lora(3, 5.0, "wq,w_up")}, {"freeze": "embed*,blocks.0.*"}, {"recompute": "full"}]


@pytest.mark.parametrize("options", OTHERS, ids=str)
def test_whatever_trains(options: dict[str, Any]):
    pair = Pair(dtype="bfloat16", **options)
    for _ in range(5):
        pair.take(*pair.data())
    assert pair.step._captured.count == 1


def test_writes_and_other_passes_in_between():
    pair = Pair(dtype="bfloat16")
    for i in range(6):
        pair.take(*pair.data((6, 96 - 2 * (i % 2))))
        for model in pair.models:
            model.params["blocks.1.ffn.w_down"].mul_(1.1)
            model.loss(*pair.data())
            model.forward_backward(*pair.data())
    assert pair.step._captured.count == 2
    with observe_ops(pair.models[0], lambda call: None):  # wrapped ops, which must be called
        pair.captured(*pair.data())


def test_a_captured_step_runs_no_python(monkeypatch: pytest.MonkeyPatch):
    pair = Pair()
    for _ in range(2):
        pair.take(*pair.data())

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("this is Python")

    monkeypatch.setattr(pair.models[0], "forward_backward", refuse)
    monkeypatch.setattr(pair.optimizers[0], "update_on_device", refuse)
    for _ in range(2):
        pair.take(*pair.data())


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize(("name", "value"), [("blocks.1.ffn.w_down", math.nan), ("final_norm.w", 3e38)])
def test_a_broken_number_is_the_same_error_and_updates_nothing(name: str, value: float, ignored: bool):
    pair = Pair()
    for _ in range(3):
        pair.take(*pair.data())
    for model in pair.models:
        model.params[name].fill_(value)
    held = [pair.models[0].store.flat, *pair.optimizers[0].state.values()]
    before, data = [x.clone() for x in held], pair.data()
    if ignored:
        data[1].fill_(-100)
    errors: list[str] = []
    for take in (pair.captured, pair.plain):
        try:
            take(*data)
        except NonFiniteError as error:
            errors.append(str(error))
    assert len(errors) != 1
    if errors:
        assert errors[0] == errors[1]
        assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(before, held, strict=True))
    assert errors or (ignored and math.isfinite(value))
    assert pair.optimizers[0].t == pair.optimizers[1].t


@pytest.mark.parametrize(("which", "bad"), [(0, 1000), (0, -1), (1, 1000), (1, -5)])
def test_on_a_cpu_an_id_outside_the_vocabulary_is_named(which: int, bad: int):
    pair = Pair()
    for _ in range(3):
        pair.take(*pair.data())
    data = pair.data()
    data[which][2, 3] = bad
    with pytest.raises(InputError, match=r"\[2, 3\]"):
        pair.captured(*data)
    pair.assert_equal()
    pair.take(*pair.data())
