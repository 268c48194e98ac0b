"""Memory by part: the parts are the peak, and a real process measures about that."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tapeless.bench.process import Process, environment
from tapeless.bench.task import Task
from tapeless.config import ModelConfig, TrainConfig
from tapeless.estimate import memory
from tapeless.estimate.memory import MIB, memory_of
from tapeless.estimate.target import Target
from tapeless.kernels.workspace import LARGEST_CAPTURE

RESULTS = Path(__file__).parents[2] / "bench" / "results"
MODEL = ModelConfig(vocab_size=8000, hidden_dim=256, num_layers=4, num_heads=4, intermediate_dim=688, max_seq_len=128)
TRAIN = TrainConfig(batch_size=16, seq_len=128, ops="cpu", lr=1e-4)


def test_the_parts_are_the_peak_of_a_step():
    found = memory_of(MODEL, replace(TRAIN, ops="reference"))
    assert sum(found.parts.values()) == found.phases["training step"]
    assert found.peak == max(found.phases.values())
    assert found.process > 0
    assert {"parameters", "gradients", "optimizer state", "saved activations", "logits", "working buffers"} <= set(found.parts)


def test_the_gradient_check_counts_where_it_is_made(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("numba")
    train = replace(TRAIN, batch_size=1)
    assert memory_of(MODEL, train).peak == memory_of(MODEL, train).phases["gradient check"]
    assert "gradient check" not in memory_of(MODEL, replace(train, verify=False)).phases
    monkeypatch.setattr(memory, "CHECKED", 1000)
    assert "gradient check" not in memory_of(MODEL, train).phases


def test_recomputing_saves_what_it_says():
    peaks = [memory_of(MODEL, replace(TRAIN, recompute=policy)).phases["training step"] for policy in ("none", "cheap", "full")]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("ops", ["auto", "reference"])
def test_every_dtype_of_a_cpu_has_an_estimate(ops: str):
    peaks = [memory_of(MODEL, replace(TRAIN, ops=ops, dtype=dtype)).peak for dtype in ("bfloat16", "float32", "float64")]
    assert min(peaks) > 0


def test_what_is_far_too_large_is_not_tried(monkeypatch: pytest.MonkeyPatch):
    """The peak is at least what its weights, activations and batch take; a dry run would take as long as the batch is large."""
    exact = memory_of(MODEL, replace(TRAIN, ops="reference", verify=False)).peak
    monkeypatch.setattr(memory, "available_bytes", lambda device: exact // 100)
    monkeypatch.setattr(memory, "dry_run", lambda *arguments: pytest.fail("a dry run of what is far too large"))
    far = memory_of(MODEL, replace(TRAIN, ops="reference", verify=False))
    assert exact // 100 * memory.FAR < far.peak == sum(far.parts.values()) <= exact


def test_a_moving_average_is_a_part_of_it():
    plain, averaged = (memory_of(MODEL, replace(TRAIN, ops="reference", ema_decay=decay)) for decay in (0.0, 0.9))
    assert "moving average" not in plain.parts
    assert averaged.parts["moving average"] == averaged.parts["parameters"]
    for phase in ("training step", "evaluation", "gradient check"):
        assert averaged.phases[phase] - plain.phases[phase] == averaged.parts["moving average"]


def test_what_a_captured_evaluation_owns_is_there_in_every_step_after_it():
    pytest.importorskip("numba")
    narrow = ModelConfig(vocab_size=300, hidden_dim=64, num_layers=2, num_heads=4, intermediate_dim=64, max_seq_len=128)
    found, whole = memory_of(narrow, TRAIN), memory_of(MODEL, TRAIN)
    owned = found.parts["captured evaluation"]
    assert 0 < owned <= LARGEST_CAPTURE
    assert sum(found.parts.values()) == found.phases["training step"] > owned
    assert "captured evaluation" not in whole.parts  # it would own more
    assert "captured evaluation" not in memory_of(narrow, replace(TRAIN, ops="reference")).parts


def test_the_copy_of_a_checkpoint_counts_but_no_run_is_refused_for_it():
    found = memory_of(MODEL, replace(TRAIN, verify=False, ema_decay=0.9))
    params = found.parts["parameters"]
    assert found.checkpoint == pytest.approx(4 * params, rel=1e-3)  # weights, two moments, their average
    assert found.saving == found.peak + found.checkpoint


def test_a_gpu_takes_what_was_measured_on_one():
    """Within 3 % of a measured step; acceptance/estimate_elsewhere.py does it for all of them."""
    measured = json.loads((RESULTS / "cuda-llama-124m.json").read_text())
    row = next(row for row in measured["contenders"] if (row["contender"], row["dtype"]) == ("ours", "bfloat16"))
    train = TrainConfig(
        batch_size=measured["batch_size"], seq_len=measured["seq_len"], dtype="bfloat16", device="cuda", ops="triton"
    )
    found = memory_of(ModelConfig(**measured["model"]), train, Target("h200", 10**12))
    assert found.phases["training step"] == pytest.approx(row["reserved_bytes"], rel=0.03)
    assert sum(found.parts.values()) == found.phases["training step"]
    assert (found.ops, found.device, found.process) == ("triton", "h200", 0)


def test_a_gpu_keeps_the_memory_of_a_graph_while_it_evaluates():
    """A step with dropout is no graph, and leaves its memory to the evaluation."""
    train, gpu = replace(TRAIN, device="cuda", dtype="bfloat16", ops="triton"), Target("a GPU", 10**12)
    captured, eager = (memory_of(replace(MODEL, dropout=dropout), train, gpu) for dropout in (0.0, 0.1))
    kept = captured.parts["saved activations"]
    assert captured.phases["evaluation"] - eager.phases["evaluation"] > kept


@pytest.mark.slow
def test_a_real_process_takes_what_was_predicted():
    """Within 10 %, in a process of its own that has its kernels compiled; acceptance/estimate.py does it at more sizes."""
    pytest.importorskip("numba")
    task = Task("ours", MODEL, TRAIN)
    for _ in range(2):  # the first may compile
        with Process(task, environment(task, 1)) as worker:
            before = worker.ask("build", task=task.as_json())["before"]
            worker.ask("first")
            worker.ask("steps", count=2)
            measured = worker.ask("finish")["peak"] - before
    found = memory_of(MODEL, TRAIN)
    predicted = found.phases["training step"] - found.parts.get("captured evaluation", 0)  # nothing is evaluated
    assert predicted == pytest.approx(measured, rel=0.1), (predicted / MIB, measured / MIB)
