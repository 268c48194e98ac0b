"""Configuration and progress of a run, read from its directory: `tapeless train info RUN`.

Loads nothing large and takes no lock, so it also works while the run is training.
Tested by: tests/train/test_info.py."""

import math
from datetime import datetime
from pathlib import Path
from typing import Any

from tapeless.config import KINDS, TrainConfig, checked
from tapeless.data.locks import holder
from tapeless.regular import read_json
from tapeless.text import Row, rows_text
from tapeless.training.checkpoint import checkpoints
from tapeless.training.metrics_log import as_written, read_metrics
from tapeless.training.rotation import named_step
from tapeless.training.run_config import RunConfig, read_run_config, train_config
from tapeless.training.run_dir import RunDir
from tapeless.training.summary import command_lines, count, duration, model_text, next_commands, optimizer_text, try_command

RECENT = 20  # steps in the mean of the last losses
NOT_STARTED, RUNNING, INTERRUPTED, DIVERGED, IMPORTED = "not started", "running", "interrupted", "diverged", "imported"


def run_facts(path: str | Path) -> dict[str, Any]:
    run = RunDir.open(path)
    with as_written(run.metrics):
        return _facts(run, read_run_config(run.config))


def _facts(run: RunDir, config: RunConfig) -> dict[str, Any]:
    events = list(read_metrics(run.metrics)) if run.metrics.exists() else []
    steps = [event for event in events if event["event"] == "step"]
    evals = [event for event in events if event["event"] == "eval"]
    starts = [event for event in events if event["event"] in ("start", "resume")]
    best = [e for e in evals if isinstance(e["val_loss"], float)]  # NaN and infinity are strings
    held_by, saved = holder(run.lock), list(checkpoints(run.checkpoints))
    total = starts[-1]["total_steps"] if starts else config.train.max_steps
    return {
        "path": str(run.path),
        **config.tables(),
        "functions": config.functions,
        "source": source_of(run.path / "data.json"),
        "parameters": starts[-1]["parameters"] if starts else None,
        "baselines": starts[-1]["baselines"] if starts else None,
        "floor": starts[-1]["floor"] if starts else None,
        "state": RUNNING if held_by else IMPORTED if config.imported else ending(events, saved),
        "held_by": held_by,
        "step": steps[-1]["step"] if steps else max(saved, default=0),
        "total_steps": total,
        "tokens": steps[-1]["tokens"] if steps else 0,
        "seconds": sum(event["step_seconds"] for event in steps),
        "started": starts[0]["time"] if starts else None,
        "resumes": sum(event["event"] == "resume" for event in starts),
        "first_loss": steps[0]["loss"] if steps else None,
        "last_loss": steps[-1]["loss"] if steps else None,
        "recent_loss": math.fsum(float(event["loss"]) for event in steps[-RECENT:]) / len(steps[-RECENT:]) if steps else None,
        "last_eval": evals[-1] if evals else None,
        "best_eval": min(best, key=lambda event: event["val_loss"]) if best else None,
        "checkpoints": saved,
        "latest": named_step(run.checkpoints, "latest"),  # a damaged one is reported by resume
        "best": named_step(run.checkpoints, "best"),
        "skipped": sum("skipped" in event for event in events),
        "problem": next((event["error"] for event in reversed(events) if "error" in event), None),
    }


def source_of(data: Path) -> str | None:
    try:
        return read_json(data)["source"]
    except (OSError, ValueError, LookupError, TypeError):
        return None  # resume reports what is wrong with it


def ending(events: list[dict[str, Any]], saved: list[int]) -> str:
    """How a run that no process holds ended, by its last event. One with checkpoints was started, even if its log is
    missing."""
    if not events:
        return INTERRUPTED if saved else NOT_STARTED
    last = events[-1]
    if last["event"] == "end":
        return last["reason"]
    return DIVERGED if last["event"] == "guard" and "error" in last else INTERRUPTED


def describe(facts: dict[str, Any]) -> str:
    with as_written(RunDir(facts["path"]).metrics):  # most of them are values of its events
        return _described(facts)


def _described(facts: dict[str, Any]) -> str:
    kind = next(kind for kind in KINDS if kind in facts)
    plugins = facts.get("plugins", {})
    model, train = checked(kind, facts[kind], facts["path"]), train_config(facts["train"], plugins, facts["path"])
    rows = [
        ("run", facts["path"]),
        ("state", state_text(facts, train)),
        ("model", model_text(model, facts["parameters"])),
        ("data", f"{facts['source'] or 'none'}, tokenizer {train.tokenizer}"),
        ("training", training_text(train)),
        ("optimizer", optimizer_text(train)),
        *progress_rows(facts),
        ("saved", saved_text(facts)),
    ]
    state = Path(facts["path"]), facts["state"], facts["total_steps"], facts["functions"], plugins
    if facts["state"] == RUNNING:
        commands = [(f"tail -f {Path(facts['path']) / 'metrics.jsonl'}", "follow it")]
    elif facts["state"] == IMPORTED:
        commands = [
            try_command(Path(facts["path"]), '--prompt "The "'),
            (f"tapeless train new --init-from {facts['path']} --dataset-path my.txt", "fine-tune it"),
        ]
    elif facts["state"] == NOT_STARTED or not facts["checkpoints"]:
        commands = [next_commands(*state)[0]]
    else:
        commands = next_commands(*state)
    return rows_text([*rows, ("next", ""), *(("", line) for line in command_lines(commands))])


def state_text(facts: dict[str, Any], train: TrainConfig) -> str:
    words = {
        RUNNING: f"running: {facts['held_by']}",
        IMPORTED: "imported: not trained here",
        NOT_STARTED: "created, but no step was taken",
        INTERRUPTED: "interrupted: the process ended without saving, for example by a kill",
        DIVERGED: f"diverged: {facts['problem']}",
        "done": "done",
        "early": f"ended early: no new best in {count(train.patience, 'evaluation')}",
        "stopped": "stopped as requested",
    }
    planned = facts["total_steps"] is not None and facts["state"] != IMPORTED
    return words[facts["state"]] + (f"; step {facts['step']:,} of {facts['total_steps']:,}" if planned else "")


def training_text(train: TrainConfig) -> str:
    rows = f"batches of {train.batch_size} x {train.seq_len}"
    rows += f" x {train.grad_accum} micro-batches" if train.grad_accum > 1 else ""
    return f"{rows}, {train.dtype} on {train.device}, seed {train.seed}"


def progress_rows(facts: dict[str, Any]) -> list[Row]:
    if not facts["step"] or facts["started"] is None:  # or the log is missing
        return []
    started = when(facts["started"])
    resumed = f", resumed {count(facts['resumes'], 'time')}" if facts["resumes"] else ""
    rows = [
        ("started", f"{started}{resumed}; {facts['tokens']:,} tokens in {duration(facts['seconds'])} of steps"),
        ("loss", f"{number(facts['recent_loss'])} mean of the last steps, {number(facts['first_loss'])} at the first"),
    ]
    if facts["skipped"]:
        rows.append(("spikes", f"{count(facts['skipped'], 'update')} skipped, each a guard event in metrics.jsonl"))
    for label, event in (("validation", facts["last_eval"]), ("best", facts["best_eval"])):
        if event:
            average = f", averaged weights {number(event['ema_val_loss'])}" if "ema_val_loss" in event else ""
            rows.append((label, f"{number(event['val_loss'])} at step {event['step']:,}{average}"))
    named = [f"{name} {number(value)}" for name, value in reversed(facts["baselines"].items())]
    floor = [] if facts["floor"] is None else [f"entropy of the source {number(facts['floor'])}"]
    return [*rows, ("baselines", ", ".join([*named, *floor]))]


def when(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "minutes")
    except (ValueError, OverflowError, OSError):
        return "at an invalid time"  # the clock of that machine was wrong


def saved_text(facts: dict[str, Any]) -> str:
    if not facts["checkpoints"]:
        return "no checkpoint"
    names = {facts["latest"]: "latest", facts["best"]: "best"}
    if facts["latest"] == facts["best"]:
        names = {facts["latest"]: "latest and best"}
    return "checkpoints of step " + ", ".join(f"{s:,} ({names[s]})" if s in names else f"{s:,}" for s in facts["checkpoints"])


def number(value: float | str) -> str:
    return f"{float(value):.4f}"  # in metrics.jsonl NaN and infinity are strings
