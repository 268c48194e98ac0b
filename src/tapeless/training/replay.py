"""Steps of a run executed again, and compared bit for bit with what it recorded: `tapeless train verify RUN --replay 10`.

From a checkpoint, or from the initial weights, with the settings that the run had there: loss and grad_norm of each step
against metrics.jsonl, and the tensors of a later checkpoint if one is in reach. If they differ, the steps are executed once
more. Two replays that agree with each other, but not with the record: software or settings are others than then, or the record
was changed. Two replays that do not: this machine does not repeat itself. Nothing is written, but for when the data were
verified (data.json).
Tested by: tests/train/test_verify_run.py."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.config import checked
from tapeless.data.prepare import Dataset, open_prepared
from tapeless.errors import CheckpointError, ConfigError
from tapeless.model.trained import checkpointed
from tapeless.optim.ema import EMA
from tapeless.training.checkpoint import Checkpoint, checkpoints, read_checkpoint, read_state
from tapeless.training.init_from import load_initial_weights
from tapeless.training.metrics_log import as_written, read_metrics
from tapeless.training.process import num_threads, process_settings
from tapeless.training.run_config import RunConfig
from tapeless.training.run_dir import RunDir
from tapeless.training.runs import make_model, set_fields, usable_config
from tapeless.training.seal import differences, seal_of
from tapeless.training.trainer import Trainer
from tapeless.training.verify_run import Check, steps_of

COMPARED = ("loss", "grad_norm")


class Replay(NamedTuple):
    numbers: list[tuple[float, ...]]  # COMPARED of each step
    tensors: dict[str, Tensor]  # at the end: weights and optimizer state
    differences: list[str]  # between the run's seal and this process


class Plan(NamedTuple):
    config: RunConfig  # as it was from `first` on
    checkpoint: Checkpoint | None  # None: from the initial weights
    first: int  # the step to begin after
    recorded: list[tuple[float, ...]]  # COMPARED of the steps after it
    then: Checkpoint | None  # of the last step, if there is one
    sealed: Mapping[str, Any] | None  # the state that says with what they were computed: of `checkpoint`, or of the next

    @property
    def last(self) -> int:
        return self.first + len(self.recorded)


def replay_run(run: RunDir, steps: int, which: str | None = None) -> Check:
    """Execute `steps` again, or as many as there are. which: the step of a checkpoint to begin with; default the newest that
    enough steps come after."""
    plan = _plan(run, steps, which)
    data = open_prepared(run.path)
    first = _executed(run, plan, data)
    name = f"replay of steps {plan.first + 1} to {plan.last}"
    compared = f"{len(plan.recorded)} losses and gradient norms"
    compared += f", {len(first.tensors)} tensors of step {plan.last}" if plan.then else ""
    wrong = _wrong(plan, first)
    if not wrong:
        return Check(name, True, f"{compared}: the same bits")
    second = _executed(run, plan, data)
    if not _same(first, second):
        text = "two replays do not agree: a hardware fault, or ops that are not deterministic"
        text += (
            "" if plan.config.train.repeatable or plan.config.train.device == "cpu" else " (the run was not --deterministic)"
        )
    elif first.differences:
        text = f"two replays agree: software or settings differ from those of the run: {'; '.join(first.differences)}"
    elif plan.sealed is None:
        text = "two replays agree: no checkpoint tells the software and settings of the run, which may differ"
    else:
        text = "two replays agree, and software and settings are those of the run: it computed something else then (a hardware "
        text += "fault), its record was changed, or something that the seal does not record differs"
    return Check(name, False, f"{wrong}; {text}")


def _plan(run: RunDir, steps: int, which: str | None) -> Plan:
    config = usable_config(run)
    if config.imported or config.functions:
        what = f"was trained with the caller's {', '.join(config.functions)}" if config.functions else "was imported"
        raise ConfigError(f"{run.path} {what}: its steps cannot be replayed; leave out --replay")
    events = list(read_metrics(run.metrics)) if run.metrics.exists() else []
    with as_written(run.metrics):
        lines, resumes = steps_of(events), [e for e in events if e["event"] == "resume" and e["changes"]]
        ends = [event["step"] for event in resumes]
        saved = checkpoints(run.checkpoints)

        def following(step: int) -> int:
            """How many steps have a line, up to a change of the configuration."""
            count = 0
            while count < steps and step + count + 1 in lines and not (count and step + count in ends):
                count += 1
            return count

        if which is not None and not (which.isdigit() and int(which) in {0, *saved}):
            raise CheckpointError(
                f"{run.path} has no checkpoint {which!r}; there are 0 (the beginning), {', '.join(map(str, saved))}"
            )
        first = int(which) if which is not None else max([0, *saved], key=lambda step: (following(step), step))
        if not following(first):
            raise CheckpointError(
                f"{run.path / 'metrics.jsonl'} has no line of step {first + 1}: nothing to compare a replay with"
            )
        checkpoint = read_checkpoint(saved[first]) if first in saved else None
        train = set_fields(config.train)
        seal = (checkpoint.state["seal"] if checkpoint else None) or _earliest(run, resumes)
        train |= {name.removeprefix("train."): value for name, value in seal.items() if name.startswith("train.")}
        for event in resumes:
            if event["step"] == first:
                train |= {name: new for name, (_, new) in event["changes"].items() if name in train or new is not None}
        last = first + following(first)
        recorded = [tuple(lines[n][name] for name in COMPARED) for n in range(first + 1, last + 1)]
    known = {name: value for name, value in train.items() if value is not None}
    then = read_checkpoint(saved[last]) if last in saved else None
    later = [path for step, path in saved.items() if step > first]
    sealed = checkpoint.state if checkpoint else read_state(later[0]) if later else None
    return Plan(replace(config, train=checked("train", known, str(run.config))), checkpoint, first, recorded, then, sealed)


def _earliest(run: RunDir, resumes: list[dict[str, Any]]) -> Mapping[str, Any]:
    """The settings that later resumes changed, as they were at first."""
    found: dict[str, Any] = {}
    for event in resumes:
        for name, (old, _) in event["changes"].items():
            found.setdefault(f"train.{name}", old)
    return found


def _executed(run: RunDir, plan: Plan, data: Dataset) -> Replay:
    threads = plan.sealed["threads"] if plan.sealed else None
    if threads is not None and threads > (torch.get_num_threads() if plan.config.train.threads is None else threads):
        threads = None
    with process_settings(plan.config.train), num_threads(threads) if threads else nullcontext():
        model = make_model(plan.config.model, plan.config.train)
        initial = RunDir(run.path)
        if plan.checkpoint is None:
            initial.checkpoints = run.path / "none"
        load_initial_weights(model, initial, plan.config, on_warning=lambda text: None)
        seal = seal_of(plan.config, model)
        trainer = Trainer(model, plan.config.train, data, seal=seal)
        if plan.checkpoint is not None:
            trainer.resume(plan.checkpoint)
        ranks = None if plan.config.train.sums_in_order else 1
        differ = differences(plan.sealed, seal, ranks=ranks) if plan.sealed else []
        found = [str(d) for d in differ if not d.of_config]
        numbers = []
        for _ in plan.recorded:
            metrics = trainer.step(*trainer.next_batch())
            numbers.append(tuple(getattr(metrics, name) for name in COMPARED))
        state = trainer.optimizer.named_state() | ({} if trainer.ema is None else {EMA: trainer.ema.named()})
        tensors = _flat(checkpointed(model.params), state)
        return Replay(numbers, {name: x.detach().cpu().clone() for name, x in tensors.items()}, found)


def _flat(params: Mapping[str, Tensor], optim: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {**params, **{f"{kind}/{name}": x for kind, views in optim.items() for name, x in views.items()}}


def _wrong(plan: Plan, found: Replay) -> str:
    """The first difference from the record; empty if there is none."""
    for step, (expected, got) in enumerate(zip(plan.recorded, found.numbers, strict=True), plan.first + 1):
        for name, a, b in zip(COMPARED, expected, got, strict=True):
            if a != b:
                return f"step {step}: {name} is {b!r}, {a!r} in metrics.jsonl"
    if plan.then is not None:
        saved = _flat(plan.then.params, plan.then.optim)
        differ = [name for name, x in found.tensors.items() if name not in saved or not _equal(x, saved[name])]
        if differ:
            return f"{len(differ)} tensors differ from {plan.then.path}, the first: {differ[0]}"
    return ""


def _same(a: Replay, b: Replay) -> bool:
    return a.numbers == b.numbers and all(_equal(x, b.tensors[name]) for name, x in a.tensors.items())


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))
    )
