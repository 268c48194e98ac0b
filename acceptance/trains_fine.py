"""How many of the mutants would a person notice who only watches the loss? Each is planted and a small model trained with it.

A mutant trains fine if the mean loss of the last 20 of 200 steps is at most 10 % above that of the healthy code. The set-up is
the first of SETUPS in which the mutant makes any difference to the weights; some make none in training (decoding, documents).

python acceptance/trains_fine.py [NUMBER …]     all mutants, or those of the given numbers (then nothing is stored)"""

import argparse
import ast
import dataclasses
import difflib
import inspect
import math
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import harness  # noqa: F401  puts tests/ on the path
import numpy as np
import torch
from claim import Claims
from torch import Tensor

from mutants.run import TRAINS_FINE, mutated
from mutants.table import MUTANTS

STEPS, LAST, PROBE = 200, 20, 40  # of a run, those that count, and those that show whether a mutant is felt at all
B, T, CUT = 4, 32, 2  # rows and length of a micro-batch, and how many there are in a step
SIZES = {"vocab_size": 256, "hidden_dim": 32, "intermediate_dim": 64}
HEADS = {"num_heads": 4, "head_dim": 8, "max_seq_len": T}
LEARNED, MOST = 0.7, 0.5  # bounds: a run that learns nothing shows nothing; and most bugs are not seen in the loss
ADAMW, SGD = {"lr": 3e-3}, {"optimizer": "sgd", "lr": 0.1}


class Setup(NamedTuple):
    case: str  # of verify/fixtures.py, at the sizes above
    options: dict[str, Any]  # of TrainConfig


SETUPS = {
    **{case: Setup(case, ADAMW) for case in ("llama", "gpt2", "qk-norm", "cllm", "penalties", "mqa", "simplelm")},
    "gpt2 in bfloat16": Setup("gpt2", {**ADAMW, "dtype": "bfloat16"}),
    "simplelm by sgd": Setup("simplelm", SGD),
    "llama by muon": Setup("llama", {"optimizer": "muon", "lr": 3e-3}),
}


@cache
def text() -> np.ndarray:  # (n,) bytes of some modules of the standard library
    sources = [Path(str(module.__file__)).read_bytes() for module in (argparse, ast, dataclasses, difflib, inspect)]
    return np.frombuffer(b"".join(sources), dtype=np.uint8).astype(np.int64)


def batch(step: int) -> tuple[Tensor, Tensor]:  # tokens, targets (CUT * B, T) int64
    """Windows at random places, their ends padded by up to a half, so that micro-batches have unequal counts of targets."""
    random = np.random.default_rng(step)
    starts = random.integers(len(text()) - T - 1, size=CUT * B)
    rows = torch.from_numpy(text()[starts[:, None] + np.arange(T + 1)])
    lengths = torch.from_numpy(random.integers(T // 2, T + 1, size=CUT * B))
    tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    return tokens, targets.masked_fill(torch.arange(T) >= lengths[:, None], -100)


def train(setup: Setup, steps: int) -> tuple[list[float], Tensor]:
    """Losses and final weights of a run with whichever copy of the package is imported now; it is stopped halfway and goes
    on from its checkpoint."""
    from tapeless.config import ModelConfig, TrainConfig
    from tapeless.data.prepare import Dataset
    from tapeless.data.tokenizer import make_tokenizer
    from tapeless.model.build import build_model
    from tapeless.training.checkpoint import read_checkpoint
    from tapeless.training.run_dir import RunDir
    from tapeless.training.trainer import Trainer
    from tapeless.verify.fixtures import MODEL_CASES

    case = next(case for case in MODEL_CASES if case.name == setup.case)
    is_transformer = isinstance(case.config, ModelConfig)
    model_config = dataclasses.replace(case.config, **SIZES, **(HEADS if is_transformer else {}))
    config = TrainConfig(batch_size=B, grad_accum=CUT, seq_len=T, max_steps=STEPS, **setup.options)
    data = Dataset(text(), text(), make_tokenizer("bytes", "", None), "", 1.0, "standard library", 1)

    def trainer(folder: str) -> Any:
        policy = {"recompute": case.recompute} if is_transformer else {}
        return Trainer(build_model(model_config, dtype=config.dtype, **policy), config, data, run=RunDir(folder))

    losses = []
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(folder)
        for step in range(steps):
            if step == steps // 2:
                checkpoint = read_checkpoint(run.save())
                run = trainer(folder)
                run.resume(checkpoint)
            losses.append(run.step(*batch(step)).loss)
    return losses, run.model.store.flat.clone()


def outcome(setup: Setup, steps: int) -> tuple[float, Tensor | None]:
    """The mean loss of the last steps, infinite where the run broke down, and the weights."""
    try:
        losses, weights = train(setup, steps)
    except Exception as error:
        print(f"      {type(error).__name__}: {error}", flush=True)
        return math.inf, None
    return sum(losses[-LAST:]) / len(losses[-LAST:]), weights


def is_felt(setup: Setup, healthy: Tensor) -> bool:
    _, weights = outcome(setup, PROBE)
    return weights is None or not weights.equal(healthy)


def main(wanted: list[str]) -> None:
    torch.set_num_threads(1)
    claims = Claims("trains_fine")
    healthy = {name: outcome(setup, STEPS)[0] for name, setup in SETUPS.items()}
    probes = {name: train(setup, PROBE)[1] for name, setup in SETUPS.items()}
    first = {name: train(setup, 1)[0][0] for name, setup in SETUPS.items()}
    for name, loss in healthy.items():
        print(f"      healthy {name}: {first[name]:.3f} -> {loss:.3f}", flush=True)
    records = []
    for mutant in MUTANTS:
        if wanted and mutant.number not in wanted:
            continue
        start = time.monotonic()
        with mutated(mutant):
            name = next((name for name, setup in SETUPS.items() if is_felt(setup, probes[name])), None)
            loss = None if name is None else outcome(SETUPS[name], STEPS)[0]
        ratio = None if name is None or loss is None else loss / healthy[name]
        fine = None if ratio is None else ratio <= TRAINS_FINE
        told = "not felt in training" if ratio is None else f"{name}: {ratio:.3f}, {'fine' if fine else 'NOT fine'}"
        print(f"{mutant.number:>4}  {mutant.name}: {told} ({time.monotonic() - start:.1f} s)", flush=True)
        finite = None if ratio is None or math.isinf(ratio) else round(ratio, 4)
        records.append({"number": mutant.number, "name": mutant.name, "setup": name, "ratio": finite, "fine": fine})
    felt = [record for record in records if record["fine"] is not None]
    fine = [record for record in felt if record["fine"]]
    if wanted:
        return
    left = round(max(healthy[name] / first[name] for name in SETUPS), 3)
    claims.check("healthy runs learn: share of the first loss left at the end", bound=LEARNED, measured=left, ok=left < LEARNED)
    share = round(len(fine) / len(felt), 3)
    claims.check(
        f"{len(fine)} of {len(felt)} mutants train fine: their share", bound=f"over {MOST}", measured=share, ok=share > MOST
    )
    claims.finish(healthy=healthy, first=first, mutants=records)


if __name__ == "__main__":
    main(sys.argv[1:])
