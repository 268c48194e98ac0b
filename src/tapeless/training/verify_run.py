"""Everything in the directory of a run against what it recorded: `tapeless train verify RUN`.

config.toml against its hash and the checkpoints, data and tokenizer against theirs, every file of every checkpoint against its
manifest, metrics.jsonl against itself and the checkpoints, latest and best. Steps are executed again by replay.py. What nothing
is computed from is not checked: env.json, the report, samples and dumps.
Tested by: tests/train/test_verify_run.py, tests/faults/test_moved.py."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tapeless.data.files import file_sha256
from tapeless.data.locks import holder
from tapeless.data.prepare import data_facts, open_prepared
from tapeless.data.tokenizer import load_tokenizer
from tapeless.errors import RUN_LOCKED, DamagedError, TapelessError
from tapeless.training.base import HASH, base_checkpoint
from tapeless.training.checkpoint import checkpoints, pointed, read_checkpoint
from tapeless.training.imported import FACTS
from tapeless.training.metrics_log import as_written, read_metrics
from tapeless.training.run_config import SEALED, RunConfig, is_edited, read_run_config
from tapeless.training.run_dir import RunDir
from tapeless.training.seal import config_differences, listed

Step = dict[str, Any]  # the event of one
SHOWN = 3  # problems of one kind that are named


class Check(NamedTuple):
    name: str
    ok: bool
    text: str


def verify_run(run: RunDir) -> Iterator[Check]:
    """The checks of a run that no process is training, one after the other."""
    if held_by := holder(run.lock):
        raise RUN_LOCKED(path=run.path, holder=held_by)
    states: dict[int, Mapping[str, Any]] = {}
    for step, path in checkpoints(run.checkpoints).items():
        yield _checked(f"checkpoints/{path.name}", partial(_checkpoint, path, step, states))
    config: list[RunConfig] = []
    yield _checked("config.toml", partial(_config, run, states, config))
    if not config:
        return
    (found,) = config
    yield _checked("tokenizer.json", partial(_tokenizer, run, found))
    if not found.imported:
        yield _checked("data", partial(_data, run, found))
    for name, file in FACTS.items():
        if name in found.data or (run.path / file).exists():
            yield _checked(file, partial(_file, run.path / file, found.data.get(name)))
    if found.train.lora:
        yield _checked("base", partial(_base, run, found))
    for which in ("latest", "best"):
        yield _checked(f"checkpoints/{which}", partial(_name, run.checkpoints, which, states))
    if not found.imported:
        yield _checked("metrics.jsonl", partial(_metrics, run, states))


def _checked(name: str, check: Callable[[], str]) -> Check:
    """check: returns what was checked, or raises what is wrong."""
    try:
        return Check(name, True, check())
    except TapelessError as error:
        return Check(name, False, str(error))
    except OSError as error:
        return Check(name, False, f"cannot be read: {error}")


def _checkpoint(path: Path, step: int, states: dict[int, Mapping[str, Any]]) -> str:
    found = read_checkpoint(path)
    states[step] = found.state
    if not path.name.startswith("step-") or path.name.endswith(".old"):
        return "left by a process that was killed; a resume removes it"
    tensors = len(found.params) + sum(map(len, found.optim.values()))
    return f"{tensors} tensors, sizes and hashes as in the manifest{'' if found.state['seal'] else '; without a seal'}"


def _config(run: RunDir, states: Mapping[int, Mapping[str, Any]], found: list[RunConfig]) -> str:
    config, edited = read_run_config(run.config), is_edited(run.config)
    found.append(config)
    newest = states[max(states)] if states else None
    differ = config_differences(newest, config, frozen=not edited) if newest else []
    if differ:
        raise DamagedError("; ".join(listed(differ)))
    known = "its fields are those of the newest checkpoint" if newest and newest["seal"] else "no checkpoint tells its fields"
    if edited or (edited is None and newest and newest["seal"]):
        raise DamagedError(f"edited after it was written (line 2, {SEALED.strip('# :')}); {known}")
    return known if edited is None else f"as it was written; {known}"


def _tokenizer(run: RunDir, config: RunConfig) -> str:
    found, expected = load_tokenizer(run.tokenizer), config.data.get("tokenizer_hash")
    if found.fingerprint != expected:
        raise DamagedError(f"fingerprint {found.fingerprint}, expected {expected}")
    return f"{found.kind}, {found.vocab_size} ids"


def _data(run: RunDir, config: RunConfig) -> str:
    found = open_prepared(run.path, full=True)
    for name, value in data_facts(run.path).items():
        if name in config.data and value != config.data[name]:
            raise DamagedError(f"{name} is {value}, expected {config.data[name]}")
    again = found._replace(folder=None, stored_baselines=None).baselines()
    if found.stored_baselines not in (None, again):
        raise DamagedError(f"data.json: baselines {found.stored_baselines}, expected {again}")
    return f"{len(found.train):,} and {len(found.val):,} tokens, every byte read"


def _file(path: Path, expected: str | None) -> str:
    if expected is None:
        return "not recorded by the version that began the run"
    if (found := file_sha256(path)) != expected:
        raise DamagedError(f"sha256 {found}, expected {expected}: it was edited, or damaged")
    return "as when the run began"


def _base(run: RunDir, config: RunConfig) -> str:
    found = base_checkpoint(config.data, run.path)
    return f"{found.path}, sha256 {config.data[HASH][:12]}"


def _name(folder: Path, which: str, states: Mapping[int, Mapping[str, Any]]) -> str:
    step = pointed(folder, which)
    best = states[max(states)]["best_step"] if states else None
    if step is None and ((which == "latest" and states) or (which == "best" and best in states)):
        raise DamagedError("missing")
    if step is None:
        return "there is none"
    if step not in states:
        raise DamagedError(f"names step {step}, of which there is no intact checkpoint")
    if which == "latest" and step != max(states):
        raise DamagedError(f"names step {step}, although there is one of step {max(states)}")
    # A checkpoint is from before its step's evaluation, which may have been better.
    if which == "best" and best is not None and step not in (best, max(states)):
        raise DamagedError(f"names step {step}, but the best by then was step {best}")
    return f"step {step:,}"


def _metrics(run: RunDir, states: Mapping[int, Mapping[str, Any]]) -> str:
    events = list(read_metrics(run.metrics)) if run.metrics.exists() else []
    with as_written(run.metrics):
        steps = steps_of(events)
        wrong = [f"step {n} is missing" for n in range(1, max(states, default=0) + 1) if n not in steps]
        numbers = [event["step"] for event in events if event["event"] == "step"]
        wrong += [f"step {b} comes after step {a}" for a, b in pairwise(numbers) if b <= a]
        for step, state in states.items():
            if step in steps:
                wrong += _against(state, steps, events)
    if wrong:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise DamagedError("; ".join(wrong[:SHOWN]) + more)
    return f"{len(events):,} lines, {len(steps):,} steps, each once; tokens and losses are those in the checkpoints"


def steps_of(events: list[dict[str, Any]]) -> dict[int, Step]:
    return {event["step"]: event for event in events if event["event"] == "step"}


def _against(state: Mapping[str, Any], steps: Mapping[int, Step], events: list[dict[str, Any]]) -> list[str]:
    """What the state of a checkpoint says about the lines up to it, bit for bit."""
    last, wrong = state["step"], list[str]()
    if steps[last]["tokens"] != state["tokens"]:
        wrong.append(f"step {last}: tokens is {steps[last]['tokens']}, {state['tokens']} in its checkpoint")
    losses = state["guard"].get("losses", [])
    for n, loss in enumerate(losses, last - len(losses) + 1):
        if n in steps and steps[n]["loss"] != loss:
            wrong.append(f"step {n}: loss is {steps[n]['loss']!r}, {loss!r} in the checkpoint of step {last}")
    if state["best_step"] is not None:
        values = {e["step"]: e["val_loss"] for e in events if e["event"] == "eval"}
        if values.get(state["best_step"]) != state["best_val_loss"]:
            expected = f"{state['best_val_loss']!r} in the checkpoint of step {last}"
            wrong.append(f"step {state['best_step']}: val_loss is {values.get(state['best_step'])!r}, {expected}")
    return wrong
