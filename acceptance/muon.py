"""Muon beside AdamW: characters of Shakespeare after 300 steps, each at its best learning rate, and what a step costs.

The rate of each is chosen on seed 0; the seeds that count are others."""

import statistics

import numpy as np
from claim import Claims, skip
from training import SHAKESPEARE, load_average, of_kind, scratch, train

from tapeless.config import ModelConfig, TrainConfig, load_preset
from tapeless.data.prepare import Dataset
from tapeless.data.tokenizer import make_tokenizer
from tapeless.model.build import build_model
from tapeless.training.run_dir import RunDir
from tapeless.training.trainer import Trainer

STEPS, SEEDS = 300, (1, 2, 3)
RATES = (3e-3, 6e-3, 1.2e-2)
FLAGS = ["--preset", "shakespeare-char", "--dataset-path", SHAKESPEARE, "--max-steps", STEPS, "--eval-windows", 0]
FLAGS += ["--eval-every", 0, "--sample-every", 0, "--no-verify"]
TURNS, WARM = 30, 3  # steps that are timed, and before them
COSTS = {"shakespeare-char": (6, 128), "tiny": (8, 128)}  # rows and length of a batch
KINDS = {"adamw": {}, "adamw with an average": {"ema_decay": 0.999}, "muon": {"optimizer": "muon"}}
BOUND = 1.75  # of a step's time


def validation_loss(folder: RunDir, optimizer: str, lr: float, seed: int) -> float:
    """Over the whole validation part, at the end."""
    train(folder, *FLAGS, "--optimizer", optimizer, "--lr", lr, "--seed", seed)
    return of_kind(folder, "eval")[-1]["val_loss"]


def milliseconds(preset: str) -> dict[str, float]:
    """A step with each of KINDS, the median of steps that take turns."""
    rows, length = COSTS[preset]
    model_config = load_preset(preset)
    assert isinstance(model_config, ModelConfig)
    tokens = np.random.default_rng(0).integers(model_config.vocab_size, size=100 * length)
    data = Dataset(tokens, tokens, make_tokenizer("bytes", "", None), "", 1.0, "fixture", 1)
    trainers = {
        kind: Trainer(build_model(model_config), TrainConfig(batch_size=rows, seq_len=length, **options), data)
        for kind, options in KINDS.items()
    }
    taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(WARM + TURNS):
        for kind, trainer in trainers.items():
            taken[kind].append(trainer.step(*trainer.next_batch()).step_seconds)
    return {kind: round(1000 * statistics.median(each[WARM:]), 2) for kind, each in taken.items()}


if not SHAKESPEARE.is_file():
    skip(f"{SHAKESPEARE} is not there")

claims = Claims("muon")
tuned: dict[str, dict[float, float]] = {}
losses: dict[str, list[float]] = {}
with scratch() as folder:
    for optimizer in ("adamw", "muon"):
        tuned[optimizer] = {lr: validation_loss(RunDir(folder / f"{optimizer}-{lr}"), optimizer, lr, 0) for lr in RATES}
        best = min(RATES, key=lambda lr: tuned[optimizer][lr])
        print(f"      {optimizer}: {', '.join(f'{lr:g} {loss:.4f}' for lr, loss in tuned[optimizer].items())}", flush=True)
        losses[optimizer] = [validation_loss(RunDir(folder / f"{optimizer}-seed-{n}"), optimizer, best, n) for n in SEEDS]
        print(f"      {optimizer} at {best:g}: {', '.join(f'{loss:.4f}' for loss in losses[optimizer])}", flush=True)
worst, adamw = max(losses["muon"]), min(losses["adamw"])
claims.check(
    f"shakespeare-char, {STEPS} steps, {len(SEEDS)} seeds, each at its best of {len(RATES)} rates: validation loss of Muon "
    f"{statistics.mean(losses['muon']):.4f}, of AdamW {statistics.mean(losses['adamw']):.4f}",
    bound="the worst seed of Muon below the best of AdamW",
    measured=f"{worst:.4f} and {adamw:.4f}",
    ok=worst < adamw,
)
costs = {preset: milliseconds(preset) for preset in COSTS}
for preset, cost in costs.items():
    ratio = cost["muon"] / cost["adamw"]
    claims.check(
        f"{preset} {'x'.join(map(str, COSTS[preset]))}: a step with AdamW {cost['adamw']} ms, with an average of the weights "
        f"{cost['adamw with an average']} ms, with Muon {cost['muon']} ms",
        bound=f"Muon at most {BOUND} times AdamW",
        measured=f"{ratio:.2f} times",
        ok=ratio <= BOUND,
    )
claims.finish(tuned=tuned, losses=losses, milliseconds=costs, load_average=load_average())
