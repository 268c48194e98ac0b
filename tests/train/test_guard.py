"""The guard against spikes: what is one, that nothing is updated then, and that a resumed run decides as the unbroken one."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from run_fixtures import MODEL, begin_run, config, dataset, events, final_bytes, play, state

from tapeless.model.build import build_model
from tapeless.training import step as step_module
from tapeless.training.checkpoint import checkpoints
from tapeless.training.guard import FLOOR, LEAST, WINDOW, SpikeGuard
from tapeless.training.run_dir import RunDir
from tapeless.training.trainer import Trainer


def guard(losses: list[float], z: float = 20.0) -> SpikeGuard:
    return SpikeGuard(z, losses)


def noisy(count: int, level: float = 2.0, deviation: float = 0.2) -> list[float]:
    draw = random.Random(0)
    return [draw.gauss(level, deviation) for _ in range(count)]


def test_the_limit_is_z_deviations_above_the_median():
    limit = guard(noisy(WINDOW)).limit()
    assert limit.median == pytest.approx(2.0, abs=0.05)
    assert limit.scale == pytest.approx(0.2, rel=0.2)  # for normal losses the deviation itself
    assert limit.loss == limit.median + 20 * limit.scale


def test_spikes_do_not_move_it():
    losses = noisy(WINDOW)
    spoilt = [1e6 if i % 4 == 0 else loss for i, loss in enumerate(losses)]  # a quarter of them
    assert guard(spoilt).limit().loss < guard(losses).limit().loss + 3


def test_there_is_none_before_enough_was_seen_nor_where_nobody_wants_one():
    assert guard(noisy(LEAST - 1)).limit().loss == math.inf
    assert guard(noisy(LEAST)).limit().loss < math.inf
    assert guard(noisy(WINDOW), z=0.0).limit().loss == math.inf


def test_a_loss_that_hardly_varies_has_a_floor():
    assert guard([0.01] * WINDOW).limit().loss == pytest.approx(0.01 + 20 * FLOOR)


def test_a_level_that_stays_becomes_the_normal_one():
    a_guard, skipped = guard(noisy(WINDOW)), 0
    for _ in range(WINDOW):
        skipped += a_guard.limit().loss < 50.0
        a_guard.take(50.0)
    assert 0 < skipped <= WINDOW // 2 + 1


def test_the_window_forgets():
    a_guard = guard(noisy(WINDOW, level=9.0))
    for loss in noisy(WINDOW):
        a_guard.take(loss)
    assert list(a_guard.losses) == noisy(WINDOW)


SPIKES = {LEAST + 5, LEAST + 6, LEAST + 9}  # steps counted from 1
STEPS = LEAST + 12


@pytest.fixture
def spiking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is far from what the model expects, at certain steps."""
    healthy = step_module.accumulate_gradients

    def spoilt(*args: Any, step: int, **options: Any) -> float:
        return healthy(*args, step=step, **options) + (100.0 if step + 1 in SPIKES else 0.0)

    monkeypatch.setattr(step_module, "accumulate_gradients", spoilt)


def settings(**changes: Any) -> Any:
    return config(max_steps=STEPS, save_every=LEAST + 2, eval_every=0, sample_every=0, eval_windows=2, **changes)


@pytest.mark.usefixtures("spiking")
def test_a_spike_updates_nothing_and_is_counted(tmp_path: Path):
    told: list[dict[str, Any]] = []
    trainer = Trainer(build_model(MODEL), settings(), dataset(tmp_path), on_event=told.append)
    for number in range(1, STEPS + 1):
        before = [trainer.model.store.flat.clone(), *(x.clone() for x in trainer.optimizer.state.values())]
        trainer.step(*trainer.next_batch())
        after = [trainer.model.store.flat, *trainer.optimizer.state.values()]
        assert all(map(torch.equal, before, after)) == (number in SPIKES), number
    assert (trainer.steps, trainer.skipped, trainer.optimizer.t) == (STEPS, 3, STEPS - 3)
    guards = [event for event in told if event["event"] == "guard"]
    assert [event["skipped_step"] for event in guards] == sorted(SPIKES)
    assert [event["skipped"] for event in guards] == [1, 2, 3]
    assert all(event["spike"] > 100 > event["limit"] for event in guards)
    assert "is a spike" in guards[0]["warning"]


@pytest.mark.usefixtures("spiking")
def test_switched_off_nothing_is_skipped(tmp_path: Path):
    trainer = Trainer(build_model(MODEL), settings(spike_z=0.0), dataset(tmp_path))
    trainer.run()
    assert (trainer.skipped, trainer.optimizer.t) == (0, STEPS)


@pytest.mark.usefixtures("spiking")
def test_a_resumed_run_skips_the_same_steps(tmp_path: Path):
    """From checkpoints before, between and behind the spikes; also the one right behind a spike, whose line must stay."""
    kinds = ("step", "eval", "guard")
    expected = begin_run(tmp_path / "unbroken", settings())
    play(expected)
    assert [event["skipped_step"] for event in events(expected, ["guard"])] == sorted(SPIKES)
    for stop in (LEAST + 4, LEAST + 5, LEAST + 8):
        run = begin_run(tmp_path / f"stopped-{stop}", settings())
        play(run, stopped=lambda t, stop=stop: t.steps >= stop)
        play(run, resume=True)
        assert final_bytes_without_best(run) == final_bytes_without_best(expected)
        assert events(run, kinds) == events(expected, kinds)


def final_bytes_without_best(run: RunDir) -> dict[str, str]:
    return {name: value for name, value in final_bytes(run).items() if name != "best"}


def test_a_checkpoint_holds_the_window(tmp_path: Path):
    run = begin_run(tmp_path / "run", config(max_steps=4, save_every=4))
    play(run)
    kept = state(checkpoints(run.checkpoints)[4])["guard"]
    assert kept["losses"] == [event["loss"] for event in events(run, ["step"])]
    assert kept["skipped"] == 0
