"""The guards: NaN in a weight, a gradient and a batch ends with 4, the right tensor named, nothing updated, and resumable; a
spike in the data is skipped, on a resume alike; healthy runs are left alone; and all of it costs next to nothing."""

import contextlib
import io
import json
import math
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from claim import Claims
from training import fingerprint, library_text, lines, of_kind, scratch, steps, train

from tapeless.cli.main import main
from tapeless.config import TrainConfig, load_preset
from tapeless.data.prepare import prepare
from tapeless.model.build import build_model
from tapeless.training.guard import LEAST, SpikeGuard
from tapeless.training.invariants import check_invariants
from tapeless.training.run_dir import RunDir
from tapeless.training.trainer import Trainer

MODEL = ["--preset", "tiny", "--corpus", "arithmetic", "--batch-size", 2, "--seq-len", 32, "--max-steps", 20]
MODEL += ["--save-every", 4, "--eval-every", 10, "--eval-windows", 8, "--sample-every", 0, "--sample-tokens", 8, "--no-verify"]
BAD_STEP = 15
HEALTHY = {
    "default": ["--max-steps", 400],
    "tiny, batches of 16 tokens": ["--preset", "tiny", "--batch-size", 1, "--seq-len", 16, "--max-steps", 2000],
    "simplelm": ["--max-steps", 1500, "--preset", "simplelm"],
    "tiny, lr 0.02": ["--preset", "tiny", "--lr", 0.02, "--max-steps", 600],
}
QUIET = ["--no-verify", "--eval-every", 0, "--sample-every", 0, "--save-every", 10**6, "--eval-windows", 8]
COST = 0.005  # of a step


def command(*words: object) -> tuple[int, str]:
    """Exit status and stderr, in this process, so that a fault can be planted."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        return main([str(word) for word in words]), err.getvalue()


def weight(trainer: Trainer) -> None:
    trainer.model.params["blocks.1.ffn.w_down"][3, 4] = math.nan


def embedding_row(trainer: Trainer) -> None:
    tokens, _ = trainer.loader.batch(trainer.samples)
    trainer.model.params["embed.w"][tokens[1, 7], 5] = math.inf


def gradient(trainer: Trainer) -> None:
    """One element, once: what a bit that flips in memory does."""
    model: Any = trainer.model
    healthy = model.forward_backward

    def spoilt(*args: Any, **options: Any) -> Any:
        loss = healthy(*args, **options)
        model.grads["blocks.0.attn.wq"][2, 9] = math.nan
        model.forward_backward = healthy
        return loss

    model.forward_backward = spoilt


PLANTED: dict[str, tuple[Callable[[Trainer], None], str]] = {
    "a weight": (weight, "first bad tensor: parameter blocks.1.ffn.w_down[3, 4] = nan in blocks.1.ffn (first shown by"),
    "an embedding row of the batch": (embedding_row, ", 5] = inf in embed (first shown by embed embed forward, x["),
    "a gradient": (gradient, "first bad tensor: gradient of blocks.0.attn.wq[2, 9] = nan in blocks.0.attn"),
}


@contextmanager
def planted(plant: Callable[[Trainer], None], seen: list[torch.Tensor]) -> Iterator[None]:
    """The fault comes at one step, and before it the weights are looked at."""
    healthy = Trainer.next_batch

    def next_batch(self: Trainer) -> Any:
        if self.steps == BAD_STEP - 1:
            plant(self)
            seen[:] = [self.model.store.flat, self.model.store.flat.clone(), *self.optimizer.state.values()]
            seen[:] += [x.clone() for x in self.optimizer.state.values()]
        return healthy(self)

    Trainer.next_batch = next_batch  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer.next_batch = healthy  # type: ignore[method-assign]


def unchanged(seen: list[torch.Tensor]) -> bool:
    now, before, m, v, m_before, v_before = seen
    pairs = ((now, before), (m, m_before), (v, v_before))
    return all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs)


def nan_claims(claims: Claims, folder: Path) -> None:
    expected = RunDir(folder / "healthy")
    command("train", "new", *MODEL, "--out-dir", expected.path)
    for number, (what, (plant, says)) in enumerate(PLANTED.items()):
        run, seen = RunDir(folder / f"planted-{number}"), []
        with planted(plant, seen):
            code, said = command("train", "new", *MODEL, "--out-dir", run.path)
        dump = json.loads((run.path / "dumps" / f"step-{BAD_STEP:08d}.json").read_text())
        samples = [2 * (BAD_STEP - 1), 2 * BAD_STEP - 1]
        named = says in said and dump["step"] == BAD_STEP and dump["samples"] == samples and said.count("\n") == 1
        still = unchanged(seen)
        resumed, _ = command("train", "resume", run.path)
        same = resumed == 0 and fingerprint(run) == fingerprint(expected)
        same = same and lines(run, "step", "eval") == lines(expected, "step", "eval")
        claims.check(
            f"NaN or infinity planted in {what} at step {BAD_STEP}",
            bound="exit 4, nothing updated, step, batch and tensor named, the resumed run equal to the healthy one",
            measured=f"exit {code}, {'nothing' if still else 'SOMETHING'} updated, "
            f"{dump['first_bad_tensor']['tensor']} {'named' if named else 'MISNAMED'}, {'equal' if same else 'DIFFERENT'}",
            ok=code == 4 and still and named and same,
        )


def spiky_text(folder: Path) -> Path:
    """Verses, and in the midst of them two stretches of noise."""
    draw = random.Random(0)
    verse = "the forward goes down, the backward comes up, and the judges compare them\n"
    parts = [verse * 400]
    for _ in range(2):
        parts += ["".join(chr(draw.randrange(33, 127)) for _ in range(100)), verse * 400]
    path = folder / "spiky.txt"
    path.write_text("".join(parts))
    return path


def spike_claims(claims: Claims, folder: Path) -> None:
    flags = ["--preset", "tiny", "--dataset-path", spiky_text(folder), "--batch-size", 1, "--seq-len", 64, "--epochs", 1]
    flags += ["--no-verify", "--eval-every", 0, "--sample-every", 0, "--save-every", 50, "--keep-last", 1000, "--lr", 5e-3]
    expected = RunDir(folder / "spiky")
    train(expected, *flags)
    spikes = [event for event in of_kind(expected, "guard") if "skipped" in event]
    equal = []
    for event in spikes:  # from the checkpoint before each, and from the one behind it
        for at in (event["skipped_step"] // 50 * 50, event["skipped_step"] // 50 * 50 + 50):
            run = RunDir(shutil.copytree(expected.path, folder / f"from-{at}", dirs_exist_ok=True))
            name = f"step-{at:08d}"
            if not (run.checkpoints / name).is_dir():
                continue
            (run.checkpoints / "latest").write_text(f"{name}\n")
            code, _ = command("train", "resume", run.path)
            same = fingerprint(run) == fingerprint(expected) and lines(run, "guard", "step") == lines(expected, "guard", "step")
            equal.append(code == 0 and same)
    losses = ", ".join(f"{event['spike']:.1f} over a limit of {event['limit']:.1f}" for event in spikes)
    claims.check(
        "two spans of noise in a text: updates skipped, each counted and logged",
        bound="1 to 6 of them",
        measured=f"{len(spikes)}: {losses}",
        ok=1 <= len(spikes) <= 6 and [event["skipped"] for event in spikes] == list(range(1, len(spikes) + 1)),
    )
    claims.check(
        "resumed from the checkpoints before and after each spike: the same bits, the same lines",
        bound="all of them",
        measured=f"{sum(equal)} of {len(equal)}",
        ok=bool(equal) and all(equal),
    )


def largest_z(losses: list[float]) -> float:
    """How far any loss of a run stood out of those before it, by the guard's own measure."""
    guard, largest = SpikeGuard(1.0), -math.inf
    for loss in losses:
        limit = guard.limit()
        if limit.loss < math.inf:
            largest = max(largest, (loss - limit.median) / limit.scale)
        guard.take(loss)
    return largest


def healthy_claims(claims: Claims, folder: Path) -> None:
    limit = TrainConfig().spike_z
    for number, (what, flags) in enumerate(HEALTHY.items()):
        run = RunDir(folder / f"left-alone-{number}")
        train(run, *flags, *QUIET)
        losses = steps(run, "loss")
        skipped = sum("skipped" in event for event in of_kind(run, "guard"))
        claims.check(
            f"healthy run, {what}, {len(losses):,} steps: updates skipped",
            bound="0",
            measured=f"{skipped}; the loss furthest out by {largest_z(losses):.1f} deviations, the limit is {limit:g}",
            ok=skipped == 0,
        )


def seconds(call: Callable[[], object], repeats: int) -> float:
    """The best of several, since whatever else runs only ever adds."""
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def guards_seconds() -> float:
    """What the guards add to every step."""
    draw = random.Random(0)
    guard = SpikeGuard(20.0, (draw.gauss(2.0, 0.2) for _ in range(2 * LEAST)))

    def guarded() -> None:
        guard.limit()
        guard.take(draw.gauss(2.0, 0.2))

    return seconds(guarded, 1000)


def cost_claims(claims: Claims, folder: Path) -> None:
    (folder / "text.txt").write_text(library_text(200_000))
    own = guards_seconds()
    for preset, rows in (("tiny", 8), ("small", 2)):
        config = TrainConfig(dataset_path=str(folder / "text.txt"), batch_size=rows, seq_len=128)
        model = build_model(load_preset(preset))
        trainer = Trainer(model, config, prepare(config, model.config.vocab_size, folder / preset))
        batch = trainer.next_batch()
        step = seconds(lambda: trainer.step(*batch), 15 if preset == "tiny" else 6)  # noqa: B023  called here, not later
        look = seconds(lambda: check_invariants(model, *batch, step=0, first_sample=0), 3)  # noqa: B023
        claims.check(
            f"what the guards add to a step of {preset}, {rows} x 128: {1e6 * own:.0f} us of {1e3 * step:.1f} ms",
            bound=f"under {100 * COST:g} %",
            measured=f"{100 * own / step:.3f} %",
            ok=own < COST * step,
        )
        claims.check(
            f"the identities on {preset}, in addition to a step: {1e3 * look:.1f} ms; with --check-invariants-every 100",
            bound="under 5 % of the run",
            measured=f"{look / step:.2f} %",
            ok=look < 5 * step,
        )


def paranoid_claim(claims: Claims, folder: Path) -> None:
    run = RunDir(folder / "check_invariants_every")
    code, _ = command("train", "new", *MODEL, "--check-invariants-every", 3, "--out-dir", run.path)
    same = code == 0 and fingerprint(run) == fingerprint(RunDir(folder / "healthy"))
    claims.check(
        "a run with --check-invariants-every 3",
        bound="the same bits as without",
        measured="equal" if same else "DIFFERENT",
        ok=same,
    )


if __name__ == "__main__":
    parts = (nan_claims, paranoid_claim, spike_claims, healthy_claims, cost_claims)
    wanted = sys.argv[1:]
    claims = Claims("guards")
    with scratch() as folder:
        for part in parts:
            if not wanted or part.__name__ in wanted:
                part(claims, folder)
    if wanted:
        sys.exit(0 if claims.ok else 1)  # a part alone is a look, and stores no result
    claims.finish()
