"""A look at a step: norms that add up, ratios that are the weights' own, at the steps that a resume would look at too."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from run_fixtures import MODEL, begin_run, config, dataset, events, final_bytes, play

from tapeless.config import ModelConfig, SimpleLMConfig, TrainConfig
from tapeless.model.build import build_model
from tapeless.model.transformer import Transformer
from tapeless.training import layer_stats
from tapeless.training.layer_stats import LayerStats, group_of, part_of
from tapeless.training.trainer import Trainer

GROUPS = ["embed", "blocks.0.attn", "blocks.0.ffn", "blocks.1.attn", "blocks.1.ffn", "final_norm", "head"]


def watched(trainer: Trainer) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What a look at the next step says, and the weights before it."""
    look, before = LayerStats(trainer.model, 1), {name: w.clone() for name, w in trainer.model.params.items()}
    look.before()
    metrics = trainer.step(*trainer.next_batch())
    found = look.after(metrics.grad_norm)
    assert math.hypot(*found["grad_norm"].values()) == pytest.approx(metrics.grad_norm, rel=1e-6)
    return found, before


def exact_ratios(trainer: Trainer, before: dict[str, torch.Tensor]) -> dict[str, float]:
    squares: dict[str, list[float]] = {}
    for name, w in trainer.model.params.items():
        pair = squares.setdefault(group_of(name), [0.0, 0.0])
        pair[0] += float((w - before[name]).double().square().sum())
        pair[1] += float(before[name].double().square().sum())
    return {group: math.sqrt(moved / size) for group, (moved, size) in squares.items()}


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("grad_clip", [0.0, 0.05])
def test_norms_and_ratios_are_the_steps_own(tmp_path: Path, optimizer: str, grad_clip: float):
    """Before clipping, though some optimizers have shortened the gradients by then; and whatever the optimizer."""
    data = dataset(tmp_path)
    trainer = Trainer(Transformer(MODEL), config(optimizer=optimizer, grad_clip=grad_clip), data)
    twin = Trainer(Transformer(MODEL), config(optimizer=optimizer, grad_clip=0.0, lr=1e-12), data)
    found, before = watched(trainer)
    twin.step(*twin.next_batch())  # the same gradients, as they are without clipping
    expected: dict[str, float] = {}
    for name, dw in twin.model.grads.items():
        expected[group_of(name)] = math.hypot(expected.get(group_of(name), 0.0), float(dw.norm()))
    assert list(found["grad_norm"]) == list(found["update_ratio"]) == GROUPS
    assert found["grad_norm"] == pytest.approx(expected, rel=1e-5)
    assert found["update_ratio"] == pytest.approx(exact_ratios(trainer, before), rel=1e-5)
    assert found["device_memory_bytes"] is None


def test_a_simplelm_has_its_own_groups(tmp_path: Path):
    model = build_model(SimpleLMConfig(hidden_dim=8, intermediate_dim=12), seed=0, device="cpu", dtype="float32")
    trainer = Trainer(model, config(seq_len=8), dataset(tmp_path))
    found, before = watched(trainer)
    assert found["update_ratio"] == pytest.approx(exact_ratios(trainer, before), rel=1e-5)


def test_a_large_matrix_is_judged_by_some_of_its_elements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An embedding most of whose rows no token of the batch names: the rows' own ratios differ by orders of magnitude."""
    monkeypatch.setattr(layer_stats, "SAMPLED", 2**11)
    wide = ModelConfig(vocab_size=256, hidden_dim=64, num_layers=1, num_heads=2, intermediate_dim=96, max_seq_len=8)
    trainer = Trainer(Transformer(wide), config(), dataset(tmp_path))
    part = part_of(trainer.model.params["embed.w"])
    assert part.w.numel() == -(-256 * 64 // 9)  # an eighth would be enough, but 8 divides 64
    assert part.w.numel() * part.weight == 256 * 64
    assert {9 * i % 64 for i in range(part.w.numel())} == set(range(64))  # every column, and every row too
    for _ in range(3):
        found, before = watched(trainer)
        assert found["update_ratio"] == pytest.approx(exact_ratios(trainer, before), rel=0.05)


@pytest.mark.parametrize(
    ("every", "steps"),
    [(0, []), (1, [*range(1, 21)]), (5, [1, 2, 4, 5, 10, 15, 20]), (8, [1, 2, 4, 8, 16]), (100, [1, 2, 4, 8, 16])],
)
def test_when(every: int, steps: list[int]):
    look = LayerStats(Transformer(MODEL), every)
    assert [step for step in range(1, 21) if look.due(step)] == steps


def test_it_changes_no_bit(tmp_path: Path):
    runs = [begin_run(tmp_path / f"every-{n}", config(layer_stats_every=n, grad_clip=0.5)) for n in (0, 1)]
    for run in runs:
        play(run)
    assert final_bytes(runs[0]) == final_bytes(runs[1])
    assert events(runs[0]) == [event for event in events(runs[1]) if event["event"] != "layer_stats"]
    assert len(events(runs[1], ["layer_stats"])) == 12


def test_a_resumed_run_looks_where_the_unbroken_one_did(tmp_path: Path):
    unbroken, broken = (begin_run(tmp_path / name, config(layer_stats_every=5)) for name in ("unbroken", "broken"))
    play(unbroken)
    for stop in (4, 5, 9):
        play(broken, resume=stop > 4, stopped=lambda trainer, stop=stop: trainer.steps >= stop)
    play(broken, resume=True)
    assert [event["step"] for event in events(unbroken, ["layer_stats"])] == [1, 2, 4, 5, 10]
    assert events(broken, ["step", "layer_stats"]) == events(unbroken, ["step", "layer_stats"])


def test_a_default_run_is_watched():
    assert TrainConfig().layer_stats_every == 50


def test_a_device_without_float64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As mps: only what was copied to the CPU may become float64."""
    trainer = Trainer(build_model(MODEL), config(), dataset(tmp_path))
    expected, _ = watched(Trainer(build_model(MODEL), config(), dataset(tmp_path)))
    host: set[int] = set()
    cpu, double = torch.Tensor.cpu, torch.Tensor.double

    def to_host(x: torch.Tensor) -> torch.Tensor:
        copy = cpu(x).clone()
        host.add(id(copy))
        return copy

    def only_on_the_host(x: torch.Tensor) -> torch.Tensor:
        if id(x) not in host:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
        return double(x)

    monkeypatch.setattr(torch.Tensor, "cpu", to_host)
    monkeypatch.setattr(torch.Tensor, "double", only_on_the_host)
    look = LayerStats(trainer.model, 1)
    look.before()
    found = look.after(trainer.step(*trainer.next_batch()).grad_norm)
    assert host
    assert found["update_ratio"] == expected["update_ratio"]
    assert found["grad_norm"] == expected["grad_norm"]
