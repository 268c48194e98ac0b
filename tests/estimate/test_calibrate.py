"""The time of a run from that of its parts: which steps are measured, how they are put together, and that they are real."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from tapeless.config import ModelConfig, SimpleLMConfig, TrainConfig
from tapeless.errors import TooLargeError
from tapeless.estimate import calibrate as module
from tapeless.estimate.calibrate import Times, calibrate, choose_reduced, duration_of, extrapolated
from tapeless.estimate.memory import memory_of

MODEL = ModelConfig(vocab_size=256, hidden_dim=32, num_layers=5, num_heads=2, intermediate_dim=64, max_seq_len=32)
TRAIN = TrainConfig(batch_size=8, seq_len=32, grad_accum=3, ops="cpu")
PLENTY = 2**40

pytest.importorskip("numba")


def test_a_line_through_two_depths():
    assert extrapolated([1, 3], [2.0, 6.0], 9) == 18.0
    assert extrapolated([1, 3], [2.0, 1.0], 9) == 2.0  # noise may not make layers cost less than nothing
    assert extrapolated([4], [2.0], 4) == 2.0


def reduced(
    config, monkeypatch: pytest.MonkeyPatch, *, rate: float, room: int = PLENTY, train: TrainConfig = TRAIN
) -> list[tuple[int | None, int]]:
    """Layers and rows that are measured on a machine of `rate` FLOP/s."""
    monkeypatch.setattr(module, "matmul_seconds", lambda dtype, device: 2 * 512**3 / rate)
    chosen = choose_reduced(config, train, memory_of(config, train), room)
    assert all(each.train.grad_accum == 1 for each in chosen)
    return [(getattr(each.config, "num_layers", None), each.train.batch_size) for each in chosen]


def test_what_is_short_is_measured_itself(monkeypatch: pytest.MonkeyPatch):
    assert reduced(MODEL, monkeypatch, rate=1e12) == [(5, 8)]


def test_what_is_long_is_measured_with_fewer_layers_then_fewer_rows(monkeypatch: pytest.MonkeyPatch):
    flops = module.step_flops(MODEL, 8 * 32, 32)
    assert reduced(MODEL, monkeypatch, rate=0.9 * flops / module.OWN / module.EFFICIENCY) == [(1, 8), (3, 8)]
    assert reduced(MODEL, monkeypatch, rate=0.2 * flops / module.OWN / module.EFFICIENCY) == [(1, 2), (3, 2)]
    shallow = replace(MODEL, num_layers=2)
    assert reduced(shallow, monkeypatch, rate=1.0) == [(1, 1), (2, 1)]
    assert reduced(replace(MODEL, num_layers=1), monkeypatch, rate=1.0) == [(1, 1)]
    assert reduced(SimpleLMConfig(), monkeypatch, rate=1.0) == [(None, 1)]


def test_windows_are_shortened_last(monkeypatch: pytest.MonkeyPatch):
    """Where one row of few layers takes long, and what is measured goes with the FLOPs."""
    model, train = replace(MODEL, max_seq_len=1024), replace(TRAIN, seq_len=1024)
    monkeypatch.setattr(module, "matmul_seconds", lambda dtype, device: 2.0 * 512**3)
    chosen = choose_reduced(model, train, memory_of(model, train), PLENTY)
    assert [(each.train.batch_size, each.train.seq_len) for each in chosen] == [(1, module.SHORT)] * 2
    rows = module.Reduced(model, replace(train, batch_size=2))
    assert module.flops_of(module.Reduced(model, train)) == 4 * module.flops_of(rows)


def test_measuring_ends_even_if_a_round_takes_long(monkeypatch: pytest.MonkeyPatch):
    """What the first round compiles is not counted, however late it is."""

    class Slow:
        rounds = 0

        def step(self) -> None:
            self.rounds += 1
            time.sleep(0.2 if self.rounds == 1 else 0.0)

        def update(self) -> None: ...

        evaluate = write = update

    bench = Slow()
    monkeypatch.setattr(module, "CAP", 0.1)
    found = module.timed([bench], "cpu", time.perf_counter())  # type: ignore[list-item]
    assert bench.rounds == 2
    assert [len(seconds) for (seconds,) in found.values()] == [1] * 4
    assert found["step"][0][0] < 0.1


def test_a_frozen_layer_need_not_be_among_the_fewer(monkeypatch: pytest.MonkeyPatch):
    assert reduced(MODEL, monkeypatch, rate=1.0, train=replace(TRAIN, freeze="blocks.4.*")) == [(1, 1), (3, 1)]


def test_what_cannot_be_measured_says_so(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(TooLargeError, match="--no-calibrate estimates everything else"):
        reduced(MODEL, monkeypatch, rate=1e12, room=1000)


def test_a_run_is_the_sum_of_its_parts():
    times = Times(micro_batch=0.5, update=0.1, evaluation=2.0, token=0.01, save=1e-6, how="")
    train = replace(TRAIN, eval_every=10, save_every=50, sample_every=0, sample_tokens=100)
    found = duration_of(times, train, steps=100, checkpoint=1000)
    assert found["step"] == pytest.approx(1.6)
    assert found["parts"] == pytest.approx({"steps": 160.0, "evaluations": 20.0, "checkpoints": 10 * 1e-3, "samples": 1.0})
    assert found["total"] == pytest.approx(sum(found["parts"].values()))


@pytest.mark.parametrize("config", [MODEL, SimpleLMConfig()], ids=["transformer", "simplelm"])
def test_real_seconds(config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "BUDGET", 0.1)
    monkeypatch.setattr(module, "WRITTEN", 1000)
    times = calibrate(config, TRAIN, memory_of(config, TRAIN), PLENTY, tmp_path / "not" / "yet")
    assert all(0 < seconds < 60 for seconds in times[:5])
    assert "of its own steps" in times.how
    assert list(tmp_path.iterdir()) == []


def test_fewer_layers_and_rows_come_near_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Coarsely, since tests share their machine: what it is a multiple of would be off by eight."""
    monkeypatch.setattr(module, "BUDGET", 1.0)
    monkeypatch.setattr(module, "WRITTEN", 1000)
    model = replace(MODEL, hidden_dim=128, intermediate_dim=512, num_layers=9)
    train = replace(TRAIN, batch_size=16)
    memory = memory_of(model, train)
    whole = calibrate(model, train, memory, PLENTY, tmp_path)
    monkeypatch.setattr(module, "OWN", 0.0)  # nothing is short enough
    monkeypatch.setattr(
        module,
        "choose_reduced",
        lambda *a: [
            module.Reduced(replace(model, num_layers=depth), replace(train, batch_size=4, grad_accum=1)) for depth in (1, 3)
        ],
    )
    part = calibrate(model, train, memory, PLENTY, tmp_path)
    assert "1 and 3 layers" in part.how
    assert 1 / 3 < part.micro_batch / whole.micro_batch < 3
