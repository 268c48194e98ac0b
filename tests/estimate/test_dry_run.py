"""The dry run against a real step whose live tensors are counted one by one."""

import gc
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tapeless.config import ModelConfig, SimpleLMConfig, TrainConfig
from tapeless.estimate.dry_run import LiveBytes, dry_run
from tapeless.kernels.dry import META, dry_ops
from tapeless.model import replay
from tapeless.model.build import build_model
from tapeless.model.memory import saved_bytes
from tapeless.ops.op import OpSet
from tapeless.training.evaluate import rows_at_once
from tapeless.training.step import optimizer_of

# Of whole cache lines, so that the flat buffers have no gaps.
MODEL = ModelConfig(
    vocab_size=300, hidden_dim=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_dim=64, max_seq_len=16
)
TRAIN = TrainConfig(batch_size=4, seq_len=16)
N = 300 * 64 * 2 + 2 * (64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 64 + 2 * 64) + 64


@pytest.mark.parametrize(("optimizer", "buffers"), [("adamw", 2), ("adam", 2), ("sgd", 1)])
def test_state_by_hand(optimizer: str, buffers: int):
    found = dry_run(MODEL, replace(TRAIN, optimizer=optimizer), "reference")
    assert found.parts["parameters"] == found.parts["gradients"] == 4 * N
    pieces = 24 * 30 if optimizer == "adamw" else 0  # AdamW's table of what decays: a few rows of three numbers
    assert 4 * N * buffers <= found.parts["optimizer state"] <= 4 * N * buffers + pieces
    assert found.checkpoint == 4 * N * (1 + buffers)
    assert found.parts["bfloat16 copy"] == 0


def test_bfloat16_has_a_copy():
    found = dry_run(MODEL, replace(TRAIN, dtype="bfloat16"), "reference")
    assert (found.parts["bfloat16 copy"], found.parts["parameters"]) == (2 * N, 4 * N)


def test_adam_without_a_kernel_needs_a_root_and_decayed_gradients():
    """On batches so small that the update is the peak."""
    tiny = replace(TRAIN, batch_size=1, seq_len=1)
    plain = dry_run(MODEL, replace(tiny, optimizer="sgd", weight_decay=0.0), "reference")
    decayed = dry_run(MODEL, replace(tiny, optimizer="sgd"), "reference")
    adam = dry_run(MODEL, replace(tiny, optimizer="adam"), "reference")
    assert decayed.step - decayed.parts["parameters"] - decayed.parts["gradients"] - decayed.parts["optimizer state"] >= 4 * N
    assert decayed.step > plain.step
    assert adam.step - adam.parts["parameters"] - adam.parts["gradients"] - adam.parts["optimizer state"] >= 8 * N


ADAPTED = replace(TRAIN, init_from="a run", lora_rank=4)
ADAPTERS = 2 * 2 * 4 * 64 + 2 * 4 * (64 + 32)  # of wq (64, 64) and wv (32, 64), two layers


@pytest.mark.parametrize(
    ("train", "trained", "written"),
    [
        (TRAIN, N, 3 * N),
        (replace(TRAIN, ema_decay=0.9), N, 4 * N),
        (replace(TRAIN, freeze="embed*"), N - 300 * 64, N + 2 * (N - 300 * 64)),
        (ADAPTED, ADAPTERS, 3 * ADAPTERS),
        (replace(ADAPTED, ema_decay=0.9, optimizer="muon"), ADAPTERS, 3 * ADAPTERS),
    ],
)
def test_what_trains_and_what_a_checkpoint_holds_by_hand(train: TrainConfig, trained: int, written: int):
    found = dry_run(MODEL, train, "reference")
    assert found.parts["gradients"] == 4 * trained
    assert found.parts["moving average"] == (4 * trained if train.ema_decay else 0)
    assert found.checkpoint == 4 * written
    assert (
        found.step
        > found.parts["parameters"]
        + found.parts["gradients"]
        + found.parts["optimizer state"]
        + found.parts["moving average"]
        + found.parts["saved activations"]
    )


def test_blocks_below_the_first_that_trains_keep_nothing():
    whole, half, none = (dry_run(MODEL, replace(TRAIN, freeze=f), "reference") for f in ("", "embed*,blocks.0.*", "embed*,bl*"))
    assert (
        whole.parts["saved activations"] - half.parts["saved activations"]
        == half.parts["saved activations"] - none.parts["saved activations"]
        > 0
    )


class Real(LiveBytes):
    """The same count of real tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self._count(x.untyped_storage())
        return result


@pytest.mark.parametrize("recompute", ["none", "cheap", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_a_real_step_of_the_reference_ops_peaks_where_the_dry_one_does(placement: str, dtype: str, recompute: str):
    train = replace(TRAIN, dtype=dtype, recompute=recompute, batch_size=32)
    config = replace(MODEL, norm_placement=placement)
    gc.collect()
    with Real() as memory:
        model = build_model(config, dtype=dtype, recompute=recompute, ops="reference", initialized=False)
        optimizer = optimizer_of(model, train)
        tokens = torch.zeros(32, 16, dtype=torch.int64)
        targets = torch.zeros_like(tokens)
        measured = memory.peak_of(
            lambda: (
                model.forward_backward(tokens, targets, num_targets=512, accumulate=False, check=False),
                optimizer.step(scale=0.5, copy=model.store.copy),
            )
        )
    # q and k are copied once more on the meta device, where no two tensors have an address to tell them apart
    assert dry_run(config, train, "reference").step == pytest.approx(measured, rel=0.03)


def test_a_captured_evaluation_owns_what_a_real_one_does(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("numba")
    owned: list[int] = []

    def captured(ops: OpSet, run: Any, batch: tuple[torch.Tensor, ...]) -> Any:
        assert ops.capture is not None
        results, calls = ops.capture(lambda: run(*batch))
        assert not isinstance(calls, str)
        owned.append(calls.nbytes)
        return None, results

    expected = dry_run(MODEL, TRAIN, "cpu").captured_evaluation
    model = build_model(MODEL, ops="cpu", initialized=False)
    windows = torch.zeros(rows_at_once(16), 16, dtype=torch.int64)
    monkeypatch.setattr(replay, "capture_pass", captured)
    for _ in range(2):
        model.loss(windows, windows, num_targets=1, check=False)
    assert owned == [expected]
    assert expected > 10**7


def test_more_micro_batches_take_no_more_memory_than_their_tokens_and_their_sum():
    one, four = dry_run(MODEL, TRAIN, "reference"), dry_run(MODEL, replace(TRAIN, grad_accum=4), "reference")
    in_place = dry_run(MODEL, replace(TRAIN, grad_accum=4, rank_invariant=False), "reference")
    assert in_place.step - one.step == 2 * 8 * 3 * 4 * 16
    assert four.step - in_place.step == four.parts["sum of micro-batches"] == four.parts["gradients"]


def test_a_simplelm():
    config = SimpleLMConfig(vocab_size=256, hidden_dim=16, intermediate_dim=32)
    found = dry_run(config, TRAIN, "reference")
    assert found.parts["parameters"] == 4 * build_model(config, device=META, initialized=False).store.flat.numel()
    assert (
        found.step
        > found.parts["parameters"]
        + found.parts["gradients"]
        + found.parts["optimizer state"]
        + found.parts["saved activations"]
    )


def test_dropout_is_part_of_it():
    pytest.importorskip("numba")
    train = replace(TRAIN, batch_size=64)
    mask = 64 * 16 * 64 * 8  # hashed in int64
    assert dry_run(replace(MODEL, dropout=0.1), train, "cpu").step - dry_run(MODEL, train, "cpu").step >= mask


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run in Triton's interpreter, on the CPU")
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")  # numpy, in the interpreter
def test_a_real_step_of_the_triton_kernels_peaks_where_the_dry_one_does():
    pytest.importorskip("triton")
    from tapeless.kernels.triton.ops import triton_ops

    with Real() as memory:
        model = build_model(MODEL, ops="reference", initialized=False)
        model.ops = triton_ops()
        optimizer = optimizer_of(model, TRAIN)
        tokens, targets = torch.zeros(2, 4, 16, dtype=torch.int64)
        state = memory.live
        measured = (
            memory.peak_of(lambda: model.forward_backward(tokens, targets, num_targets=64, accumulate=False, check=False))
            - state
        )
    assert optimizer.t == 0  # and alive until here
    assert dry_run(MODEL, TRAIN, "triton").step - state == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("policy", ["none", "cheap", "full"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_kernels_save_what_the_reference_saves(qk_norm: bool, policy: str):
    """With QK-norm two tensors of the kernels share a storage."""
    config, dry = replace(MODEL, qk_norm=qk_norm), dry_ops("cpu")
    assert dry is not None
    by_kernels = saved_bytes(config, 2, 16, policy, "bfloat16", ops=dry.ops)
    assert by_kernels == saved_bytes(config, 2, 16, policy, "bfloat16")


a, b, c = (torch.ones(shape) for shape in ((2, 3), (3,), (2, 1)))
CALLS = {
    "like": lambda a, b, c: torch.zeros_like(a, dtype=torch.float64),
    "add": lambda a, b, c: b + c,
    "add a number": lambda a, b, c: a + 1,
    "multiply": lambda a, b, c: a * c,
    "divide integers": lambda a, b, c: a.int() / b.int(),
    "divide by an integer": lambda a, b, c: a / c.int(),
    "matmul": lambda a, b, c: a.t() @ c,
    "matmul and bias": lambda a, b, c: torch.addmm(b[:1], a.t(), c),
    "matmul and bias in place": lambda a, b, c: c.addmm_(a, a.t()[:, :1], beta=0),
    "root": lambda a, b, c: a.sqrt(),
    "one over": lambda a, b, c: 1 / a,
    "order": lambda a, b, c: a.sort(stable=True)[1],
    "promoted": lambda a, b, c: a.bfloat16() + b,
    "add in place": lambda a, b, c: a.add_(c),
    "cat": lambda a, b, c: torch.cat([a, c], -1),
    "sum": lambda a, b, c: a.sum(0, dtype=torch.float64),
    "sum, kept": lambda a, b, c: a.sum((0, -1), keepdim=True),
    "sum of integers": lambda a, b, c: a.int().sum(0),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_result_is_like_that_of_a_real_call(call: Any):
    real = call(a.clone(), b, c)
    with LiveBytes():
        dry = call(*(x.to(META) for x in (a, b, c)))
    assert (dry.shape, dry.dtype, dry.device) == (real.shape, real.dtype, META)


LOADS = """
import sys
from dataclasses import replace
from tapeless.config import TrainConfig, load_preset, preset_names
from tapeless.estimate.dry_run import dry_run
from tapeless.estimate.memory import memory_of
settings = TrainConfig(batch_size=2, seq_len=16)
for name in set(preset_names()) - {"simplelm"}:
    memory_of(load_preset(name), settings)
    assert not {"torch._dynamo", "sympy"} & set(sys.modules), name
for dtype in sys.argv[1:]:  # the launchers of a GPU
    for name in ("gpt2", "qwen3-tiny"):
        dry_run(load_preset(name), replace(settings, dtype=dtype, grad_accum=2), "triton")
        assert not {"torch._dynamo", "sympy"} & set(sys.modules), (name, dtype)
"""


def test_the_estimate_of_a_preset_does_not_load_torchs_compiler():
    """It would take half a second of every start, and seconds where files are read slowly; that of a SimpleLM, which has the
    reference ops, does."""
    dtypes = ("float32", "bfloat16", "fp8") if find_spec("triton") else ()
    subprocess.run([sys.executable, "-c", LOADS, *dtypes], check=True)
