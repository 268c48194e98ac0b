"""How long a run takes, from a few seconds of it: its own steps where they are short, else steps of the same widths with fewer
layers and fewer rows.

    step(L) = step(1) + (L - 1) (step(d) - step(1)) / (d - 1)        likewise the update, an evaluation, a generated token
A micro-batch is a step less its update, and goes with the rows; the update goes with the parameters alone. The models take
turns, and of each the median counts, so that whatever else the machine does meets all of them.
Tested by: tests/estimate/test_calibrate.py, acceptance/estimate.py."""

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from tapeless.config import AnyModelConfig, ModelConfig, Sampling, TrainConfig
from tapeless.errors import NOT_MEASURABLE
from tapeless.estimate.disk import count_saves, times_due
from tapeless.estimate.fit import gib
from tapeless.estimate.memory import Memory, memory_of
from tapeless.generate.engine import generate
from tapeless.model.build import step_flops
from tapeless.model.params import DTYPES
from tapeless.optim.clip import grad_norm
from tapeless.training.captured_step import captured_step
from tapeless.training.checkpoint import STATE_FIELDS, save_checkpoint, verify
from tapeless.training.fastest import clock, matmul_seconds, side
from tapeless.training.resources import nearest_folder
from tapeless.training.runs import make_model
from tapeless.training.step import optimizer_of, train_step
from tapeless.training.summary import count

BUDGET = 4.0  # seconds of measuring
WARM, LEAST, MOST = 2, 3, 15  # rounds: not counted, and how many of them are
OWN = BUDGET / 8  # a step that takes no longer is measured as it is
EFFICIENCY = 0.5  # speed of a step's matmuls relative to a single one, for the first guess
DEPTHS = (1, 3)
TOKENS = 8  # generated at a time
WRITTEN = 2**23  # numbers in the checkpoint that is written and read for its time
SHARE = 0.7  # of the free memory that the measured models may take


class Times(NamedTuple):
    """Seconds."""

    micro_batch: float
    update: float
    evaluation: float  # of all of its windows
    token: float  # generated
    save: float  # a byte of a checkpoint, written, hashed and read again
    how: str


class Reduced(NamedTuple):
    """A smaller model and batch that are measured instead of the run's own."""

    config: AnyModelConfig
    train: TrainConfig


class Bench:
    """A reduced run: everything that it is timed at."""

    def __init__(self, reduced: Reduced):
        self.config, self.train = reduced
        self.model = make_model(*reduced)
        self.optimizer = optimizer_of(self.model, self.train)
        self.captured = captured_step(self.model, self.optimizer, self.train)
        generator = torch.Generator().manual_seed(0)
        shape = (self.train.batch_size, self.train.seq_len or 1)
        self.tokens = torch.randint(0, self.config.vocab_size, shape, generator=generator).to(self.train.device)
        self.steps = 0

    def step(self) -> None:
        if self.captured is not None:
            self.captured(self.tokens, self.tokens, lr=1e-4, step=self.steps)
        else:
            options: dict[str, Any] = {"lr": 1e-4, "grad_clip": self.train.grad_clip, "grad_accum": 1}
            train_step(
                self.model, self.optimizer, self.tokens, self.tokens, **options, step=self.steps, first_sample=self.steps
            )
        self.steps += 1

    def update(self) -> None:
        store = self.model.store
        float((self.model.ops.grad_norm or grad_norm)(store.flat_grads))
        if self.optimizer.step(scale=1.0, copy=store.copy):
            store.mark_copied()

    def evaluate(self) -> None:
        float(self.model.loss(self.tokens, self.tokens))

    def write(self) -> None:
        generate(self.model, [0], max_tokens=TOKENS, sampling=Sampling(temperature=1.0))


def calibrate(config: AnyModelConfig, train: TrainConfig, memory: Memory, room: int, out_dir: Path) -> Times:
    """memory: of the run; room: bytes that are free."""
    chosen = choose_reduced(config, train, memory, room)
    benches = [Bench(reduced) for reduced in chosen]
    found = timed(benches, train.device)
    rows = train.batch_size / chosen[0].train.batch_size
    depths = [getattr(reduced.config, "num_layers", 1) for reduced in chosen]

    def of(name: str) -> float:
        return extrapolated(depths, [median(seconds) for seconds in found[name]], getattr(config, "num_layers", 1))

    update = of("update")
    return Times(
        micro_batch=max(0.0, of("step") - update) * rows,
        update=update,
        evaluation=of("evaluate") * (train.eval_windows or 64) / chosen[0].train.batch_size,
        token=of("write") / TOKENS,
        save=seconds_a_byte(out_dir),
        how=words(chosen, config, train, len(found["step"][0])),
    )


def choose_reduced(config: AnyModelConfig, train: TrainConfig, memory: Memory, room: int) -> list[Reduced]:
    """The run itself, or its first layers with as many rows as a short step has."""
    one = replace(train, grad_accum=1)
    flops_a_second = 2 * side(train.device) ** 3 / matmul_seconds(DTYPES[train.dtype][1], train.device) * EFFICIENCY
    T = train.seq_len or 1

    def seconds(reduced: Reduced) -> float:
        return step_flops(reduced.config, reduced.train.batch_size * T, T) / flops_a_second

    if seconds(Reduced(config, one)) <= OWN and memory.phases["training step"] <= SHARE * room:
        return [Reduced(config, one)]
    configs: list[AnyModelConfig] = [config]
    if isinstance(config, ModelConfig):
        depths = sorted({min(depth, config.num_layers) for depth in DEPTHS})
        configs = [replace(config, num_layers=depth) for depth in depths]
    rows = train.batch_size
    while rows > 1 and seconds(Reduced(configs[-1], replace(one, batch_size=rows))) > OWN:
        rows = (rows + 1) // 2
    # The layers that freeze names need not be among these: with all of them trained, the time is what it is at most.
    chosen = [Reduced(each, replace(one, batch_size=rows, verify=False, freeze="")) for each in configs]
    need = sum(memory_of(*reduced).peak for reduced in chosen)
    if need > SHARE * room:
        raise NOT_MEASURABLE(need=gib(need), rows=count(rows, "row"), room=gib(room))
    return chosen


def timed(benches: list[Bench], device: str) -> dict[str, list[list[float]]]:
    """What is done -> for each bench, its seconds round by round."""
    names = ("step", "update", "evaluate", "write")
    found: dict[str, list[list[float]]] = {name: [[] for _ in benches] for name in names}
    start = 0.0
    for number in range(-WARM, MOST):
        if number == 0:
            start = time.perf_counter()
        if number >= LEAST and time.perf_counter() - start > BUDGET:
            break
        for i, bench in enumerate(benches):
            for name in names:
                seconds = clock(getattr(bench, name), device)
                if number >= 0:
                    found[name][i].append(seconds)
    return found


def extrapolated(depths: list[int], seconds: list[float], depth: int) -> float:
    """A line through two depths, which noise may not turn downwards; of one depth its own."""
    if len(depths) == 1:
        return seconds[0]
    a_layer = max(0.0, seconds[1] - seconds[0]) / (depths[1] - depths[0])
    return seconds[0] + (depth - depths[0]) * a_layer


def seconds_a_byte(out_dir: Path) -> float:
    """Of a checkpoint on the run's own disk: written and synced, hashed, and read once more by the rotation."""
    tensor = torch.ones(WRITTEN)
    state = dict.fromkeys(STATE_FIELDS, 0)
    with tempfile.TemporaryDirectory(prefix=".tapeless-", dir=nearest_folder(out_dir)) as scratch:
        start = time.perf_counter()
        verify(save_checkpoint(Path(scratch), {"w": tensor}, {}, state))
        return (time.perf_counter() - start) / tensor.nbytes


def words(chosen: list[Reduced], config: AnyModelConfig, train: TrainConfig, rounds: int) -> str:
    if chosen[0].config == config:
        return f"measured: {rounds} of its own steps"
    depths = " and ".join(str(getattr(reduced.config, "num_layers", 1)) for reduced in chosen)
    rows = chosen[0].train.batch_size
    return f"measured: {rounds} steps of {depths} layers at its own widths, {rows} of {train.batch_size} rows"


def duration_of(times: Times, train: TrainConfig, steps: int, checkpoint: int) -> dict[str, Any]:
    """Seconds of a step and of the run, from its first step to its end, in total and by part."""
    step = train.grad_accum * times.micro_batch + times.update
    parts = {
        "steps": steps * step,
        "evaluations": times_due(train.eval_every, steps) * times.evaluation,
        "checkpoints": count_saves(train, steps) * checkpoint * times.save,
        "samples": times_due(train.sample_every, steps) * train.sample_tokens * times.token,
    }
    return {"step": step, "total": sum(parts.values()), "parts": parts}
