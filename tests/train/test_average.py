"""A run that keeps an average of its weights: evaluated beside them, saved, resumed, and loaded in their place."""

from pathlib import Path
from typing import Any

import pytest
import torch
from run_fixtures import begin_run, config, dataset, events, play

import tapeless
from tapeless.config import ModelConfig
from tapeless.errors import CheckpointError, ConfigError
from tapeless.model.transformer import Transformer
from tapeless.optim.ema import Ema
from tapeless.training import runs
from tapeless.training.checkpoint import read_checkpoint
from tapeless.training.evaluate import evaluate
from tapeless.training.guard import Limit
from tapeless.training.run_dir import RunDir
from tapeless.training.trainer import Trainer

STEP = "step-00000012"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = begin_run(tmp_path / "run", config(ema_decay=0.6))
    play(run)
    return run


def test_it_follows_every_step_whatever_makes_it(tmp_path: Path):
    """The reference, kernels of the CPU, and bfloat16, whose masters are what is averaged."""
    data = dataset(tmp_path)
    for kind in ({"ops": "reference"}, {"ops": "auto"}, {"ops": "auto", "dtype": "bfloat16"}):
        model = Transformer(ModelConfig(hidden_dim=16, num_layers=1, num_heads=2, intermediate_dim=24, max_seq_len=8), **kind)
        trainer = Trainer(model, config(ema_decay=0.6), data)
        beside = Ema(model.params, 0.6)
        for _ in range(5):
            trainer.step(*trainer.next_batch())
            beside.update(trainer.steps)
        assert trainer.ema is not None
        assert trainer.ema.average.equal(beside.average)
        assert trainer.ema.average.dtype == torch.float32
        assert not trainer.ema.average.equal(model.store.flat)


def test_it_is_evaluated_beside_the_weights(run: RunDir):
    found = events(run, ["eval"])
    assert [event["step"] for event in found] == [3, 6, 9, 12]
    for which in ("raw", "ema"):
        model, data, train, _ = runs.load(run.path, weights=which, on_warning=pytest.fail)
        windows = Trainer(model, train.train, data).validation
        again = evaluate(model, windows, data.bytes_per_token)
        assert again is not None
        assert found[-1]["val_loss" if which == "raw" else "ema_val_loss"] == again.val_loss
    assert all(event["ema_val_loss"] != event["val_loss"] for event in found)


def test_evaluating_changes_nothing(tmp_path: Path):
    ends = []
    for eval_every in (1, 0):
        run = begin_run(tmp_path / f"every-{eval_every}", config(ema_decay=0.6, eval_every=eval_every))
        play(run)
        saved = read_checkpoint(run.checkpoints / STEP)
        ends.append((saved.params, saved.optim))
    (params, optim), (params_, optim_) = ends
    assert all(params[name].equal(params_[name]) for name in params)
    assert all(optim[kind][name].equal(optim_[kind][name]) for kind in optim for name in optim[kind])


def test_it_is_in_the_checkpoint_and_without_one_nothing_is(run: RunDir, tmp_path: Path):
    saved = read_checkpoint(run.checkpoints / STEP)
    assert saved.optim.keys() == {"exp_avg", "exp_avg_sq", "ema"}
    assert saved.optim["ema"].keys() == saved.params.keys()
    without = begin_run(tmp_path / "without", config())
    _, trainer = play(without)
    assert trainer.ema is None
    assert read_checkpoint(without.checkpoints / STEP).optim.keys() == {"exp_avg", "exp_avg_sq"}
    assert all("ema_val_loss" not in event for event in events(without, ["eval"]))


def test_it_is_loaded_in_place_of_the_weights(run: RunDir):
    saved = read_checkpoint(run.checkpoints / STEP)
    raw, average = tapeless.load(run.path), tapeless.load(run.path, weights="ema")
    for name, w in saved.params.items():
        assert raw.params[name].equal(w)
        assert average.params[name].equal(saved.optim["ema"][name])
    assert tapeless.load(run.checkpoints / STEP, weights="ema").params["head.w"].equal(average.params["head.w"])


def test_what_a_run_has_not_cannot_be_loaded(run: RunDir, tmp_path: Path):
    without = begin_run(tmp_path / "without", config())
    play(without)
    with pytest.raises(CheckpointError, match=r"step-00000012 holds no average of the weights: .* ema_decay 0"):
        tapeless.load(without.path, weights="ema")
    with pytest.raises(ConfigError, match=r"weights is 'emma'; did you mean 'ema'\?"):
        tapeless.load(run.path, weights="emma")


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [(0.0, 0.6, "holds no average of the weights"), (0.6, 0.0, "the average of the weights ends here")],
)
def test_an_override_begins_or_ends_it_aloud(tmp_path: Path, before: float, after: float, says: str):
    run = begin_run(tmp_path / "run", config(ema_decay=before))
    play(run, stopped=lambda t: t.steps >= 5)
    ending, trainer = play(run, resume=True, ema_decay=after)
    assert ending == "done"
    (guard,) = [event for event in events(run, ["guard"]) if "average" in event["warning"]]
    assert says in guard["warning"]
    assert (trainer.ema is None) == (after == 0)
    if trainer.ema is not None:
        assert not trainer.ema.average.equal(trainer.model.store.flat)


def test_a_stop_inside_its_evaluation_leaves_the_weights(tmp_path: Path):
    """The second evaluation of a step is the average's; a stop there must not save it for the weights."""
    expected, run = (begin_run(tmp_path / name, config(ema_decay=0.6)) for name in ("unbroken", "stopped"))
    play(expected)
    asked: list[int] = []

    def stopped(trainer: Any) -> bool:
        asked.append(trainer.steps)
        return asked.count(3) >= 2  # the step's own evaluation asks first

    assert play(run, stopped=stopped)[0] == "stopped"
    assert not events(run, ["eval"])
    play(run, resume=True)
    assert events(run, ["eval"]) == events(expected, ["eval"])
    assert (run.checkpoints / STEP / "model.safetensors").read_bytes() == (
        expected.checkpoints / STEP / "model.safetensors"
    ).read_bytes()


def test_a_skipped_update_is_not_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = Transformer(ModelConfig(hidden_dim=16, num_layers=1, num_heads=2, intermediate_dim=24, max_seq_len=8))
    trainer = Trainer(model, config(ema_decay=0.6), dataset(tmp_path))
    assert trainer.ema is not None
    for _ in range(3):
        trainer.step(*trainer.next_batch())
    before = trainer.ema.average.clone()
    monkeypatch.setattr(trainer.spikes, "limit", lambda: Limit(0.0, 0.0, 1.0))
    trainer.step(*trainer.next_batch())
    assert (trainer.skipped, trainer.optimizer.t) == (1, 3)
    assert trainer.ema.average.equal(before)
