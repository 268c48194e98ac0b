"""How long a run takes, from a few seconds of it: its own steps where they are short, else steps of the same widths with fewer
layers, fewer rows and, if one row still takes long, shorter windows.

    step(L) = step(1) + (L - 1) (step(d) - step(1)) / (d - 1)        likewise the update, an evaluation, a generated token
A micro-batch is a step less its update, and goes with its FLOPs; the update goes with the parameters alone. The models take
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
from tapeless.progress import busy
from tapeless.training.captured_step import captured_step
from tapeless.training.checkpoint import STATE_FIELDS, save_checkpoint, verify
from tapeless.training.fastest import clock, matmul_seconds, side
from tapeless.training.resources import nearest_folder
from tapeless.training.runs import make_model
from tapeless.training.step import optimizer_of, train_step
from tapeless.training.summary import count

BUDGET = 4.0  # seconds of measuring
CAP = 15.0  # seconds, the making of the models included, after which no round is begun but the one that counts
SHORT = 128  # tokens of a window that is not made shorter
WARM, LEAST, MOST = 2, 3, 15  # rounds: not counted, and how many of them are
OWN = BUDGET / 8  # a step that takes no longer is measured as it is
EFFICIENCY = 0.5  # speed of a step's matmuls relative to a single one, for the first guess
DEPTHS = (1, 3)
MEASURING = "measuring the time of a few steps"
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
    begin = time.perf_counter()
    chosen = choose_reduced(config, train, memory, room)
    benches = []
    for reduced in chosen:
        with busy(f"{MEASURING}: making a model of {count(getattr(reduced.config, 'num_layers', 1), 'layer')}"):
            benches.append(Bench(reduced))
    rounds = timed(benches, train.device, begin)
    found = {name: [median(seconds) for seconds in each] for name, each in rounds.items()}
    depths = [getattr(reduced.config, "num_layers", 1) for reduced in chosen]
    # With windows of the run's own length this is the ratio of the rows.
    scales = [flops_of(Reduced(each.config, train)) / flops_of(each) for each in chosen]

    def whole(seconds: list[float]) -> float:
        return extrapolated(depths, seconds, getattr(config, "num_layers", 1))

    def scaled(seconds: list[float]) -> float:
        return whole([scale * each for scale, each in zip(scales, seconds, strict=True)])

    alone = [step - update for step, update in zip(found["step"], found["update"], strict=True)]
    return Times(
        micro_batch=max(0.0, scaled(alone)),
        update=whole(found["update"]),
        evaluation=scaled(found["evaluate"]) * (train.eval_windows or 64) / train.batch_size,
        token=whole(found["write"]) / TOKENS,
        save=seconds_a_byte(out_dir),
        how=words(chosen, config, train, len(rounds["step"][0])),
    )


def choose_reduced(config: AnyModelConfig, train: TrainConfig, memory: Memory, room: int) -> list[Reduced]:
    """The run itself, or its first layers with as many rows as a short step has."""
    one = replace(train, grad_accum=1)
    flops_a_second = 2 * side(train.device) ** 3 / matmul_seconds(DTYPES[train.dtype][1], train.device) * EFFICIENCY

    def seconds(reduced: Reduced) -> float:
        return flops_of(reduced) / flops_a_second

    if seconds(Reduced(config, one)) <= OWN and memory.phases["training step"] <= SHARE * room:
        return [Reduced(config, one)]
    configs: list[AnyModelConfig] = [config]
    if isinstance(config, ModelConfig):
        depths = sorted({min(depth, config.num_layers) for depth in DEPTHS})
        configs = [replace(config, num_layers=depth) for depth in depths]
    rows, T = train.batch_size, train.seq_len or 1
    while max(rows, T // SHORT) > 1 and seconds(Reduced(configs[-1], replace(one, batch_size=rows, seq_len=T))) > OWN:
        rows, T = ((rows + 1) // 2, T) if rows > 1 else (1, (T + 1) // 2)
    # The layers that freeze names need not be among these: with all of them trained, the time is what it is at most.
    options: dict[str, Any] = {"batch_size": rows, "seq_len": T, "verify": False, "freeze": ""}
    chosen = [Reduced(each, replace(one, **options)) for each in configs]
    need = sum(memory_of(*reduced).peak for reduced in chosen)
    if need > SHARE * room:
        raise NOT_MEASURABLE(need=gib(need), rows=count(rows, "row"), room=gib(room))
    return chosen


def flops_of(reduced: Reduced) -> int:
    """Of a micro-batch."""
    T = reduced.train.seq_len or 1
    return step_flops(reduced.config, reduced.train.batch_size * T, T)


def timed(benches: list[Bench], device: str, begin: float) -> dict[str, list[list[float]]]:
    """What is done -> for each bench, its seconds round by round, without those to warm up. Late, one round warms up, which
    may compile kernels, and one counts. begin: time.perf_counter() of the calibration."""
    names = ("step", "update", "evaluate", "write")
    found: dict[str, list[list[float]]] = {name: [[] for _ in benches] for name in names}
    warm = done = 0  # rounds
    start = begin
    while done < MOST:
        now = time.perf_counter()
        late = now - begin > CAP
        if done and (late or (done >= LEAST and now - start > BUDGET)):
            break
        counts = warm == WARM or (warm and late)
        if counts and not done:
            start = now
        with busy(f"{MEASURING}: {f'round {done + 1} of at most {MOST}' if counts else 'warming up'}"):
            for i, bench in enumerate(benches):
                for name in names:
                    seconds = clock(getattr(bench, name), device)
                    if counts:
                        found[name][i].append(seconds)
        warm, done = (warm, done + 1) if counts else (warm + 1, done)
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
    short = chosen[0].train.seq_len
    tokens = "" if short == train.seq_len else f", {short} of {train.seq_len} tokens each"
    return f"measured: {rounds} steps of {depths} layers at its own widths, {rows} of {train.batch_size} rows{tokens}"


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
