"""`tapeless.train` and `tapeless.resume` from Python are the commands `train new` and `train resume`: the same files, the same
bits; what a callback receives is metrics.jsonl, and stopping or failing in one loses no work."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import torch
from claim import Claims
from training import fingerprint, lines, scratch, tapeless
from training import train as train_by_command

import tapeless as package
from tapeless.training.metrics_log import read_metrics
from tapeless.training.run_dir import RunDir

PRESET = "llama-tiny"
KINDS = ("step", "layer_stats", "eval", "sample", "checkpoint")
SETTINGS: dict[str, Any] = {
    "max_steps": 60,
    "batch_size": 8,
    "seq_len": 32,
    "eval_every": 20,
    "eval_windows": 8,
    "save_every": 25,
    "sample_every": 30,
    "sample_tokens": 8,
    "layer_stats_every": 20,
    "threads": 1,
}
STOP_AT = 33


def flags(text: Path) -> list[object]:
    words: list[object] = ["--preset", PRESET, "--dataset-path", text]
    for name, value in SETTINGS.items():
        words += [f"--{name.replace('_', '-')}", value]
    return words


def called(text: Path, out_dir: Path, *callbacks: Any) -> package.TrainResult:
    return package.train(PRESET, text, out_dir=out_dir, display=None, callbacks=callbacks, **SETTINGS)


def files(run: RunDir) -> list[str]:
    return sorted(str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_file())


def equal(run: RunDir, expected: RunDir, *, stopped_at: int | None = None) -> bool:
    """Weights, moments and state of the last checkpoint, and every line of metrics.jsonl but clocks. A run that was stopped has
    exactly one more checkpoint, that of its stop."""
    found = lines(run, *KINDS)
    extra = [event for event in found if event["event"] == "checkpoint" and event["step"] == stopped_at]
    others = [event for event in found if event not in extra]
    once = len(extra) == (stopped_at is not None)
    return once and others == lines(expected, *KINDS) and fingerprint(run) == fingerprint(expected)


def check_same(claims: Claims, folder: Path, text: Path) -> RunDir:
    expected, run, seen = RunDir(folder / "command"), RunDir(folder / "call"), list[dict[str, Any]]()
    train_by_command(expected, *flags(text), threads=1)
    result = called(text, run.path, seen.append)
    claims.check(
        "tapeless.train: files of the run directory against those of `train new`",
        bound=f"the same {len(files(expected))}",
        measured=f"{len(set(files(run)) & set(files(expected)))} of {len(files(run))} the same",
        ok=files(run) == files(expected),
    )
    claims.check(
        "tapeless.train: sha256 of the last checkpoint, and the lines of metrics.jsonl but clocks",
        bound=fingerprint(expected)["model.safetensors"][:16],
        measured=fingerprint(run)["model.safetensors"][:16],
        ok=equal(run, expected),
    )
    config = [
        [line for line in found.config.read_text().splitlines() if not line.startswith("out_dir")] for found in (run, expected)
    ]
    claims.check("config.toml but for out_dir", bound="equal", measured=config[0] == config[1], ok=config[0] == config[1])
    logged = list(read_metrics(run.metrics))
    claims.check(
        "a callback receives every event of metrics.jsonl, in order",
        bound=f"{len(logged)} events",
        measured=f"{len(seen)} events, {'equal' if json.loads(json.dumps(seen)) == logged else 'DIFFERENT'}",
        ok=json.loads(json.dumps(seen)) == logged and result.events() == logged,
    )
    last = [event["val_loss"] for event in logged if event["event"] == "eval"][-1]
    ok = (result.reason, result.step, result.val_loss) == ("done", SETTINGS["max_steps"], last)
    claims.check(
        "the result: reason, step, validation loss",
        bound=("done", 60, last),
        measured=(result.reason, result.step, result.val_loss),
        ok=ok,
    )
    return expected


def check_stop(claims: Claims, folder: Path, text: Path, expected: RunDir) -> None:
    run = RunDir(folder / "stopped")

    def stop(event: dict[str, Any]) -> object:
        return package.STOP if event["event"] == "step" and event["step"] == STOP_AT else None

    result = called(text, run.path, stop)
    claims.check(
        f"a callback that returns tapeless.STOP at step {STOP_AT}",
        bound=("stopped", STOP_AT),
        measured=(result.reason, result.step),
        ok=(result.reason, result.step) == ("stopped", STOP_AT),
    )
    seen: list[dict[str, Any]] = []
    result = package.resume(run.path, display=None, callbacks=[seen.append])
    claims.check(
        f"tapeless.resume from there, {len(seen)} events: the unbroken run's bits",
        bound="equal",
        measured="equal" if equal(run, expected, stopped_at=STOP_AT) else "DIFFERENT",
        ok=equal(run, expected, stopped_at=STOP_AT) and result.reason == "done",
    )
    again = RunDir(folder / "stopped-again")
    called(text, again.path, stop)
    done = tapeless("train", "resume", again.path, threads=1)
    claims.check(
        "`train resume` of it: the unbroken run's bits",
        bound="equal",
        measured="equal" if equal(again, expected, stopped_at=STOP_AT) else "DIFFERENT",
        ok=done.code == 0 and equal(again, expected, stopped_at=STOP_AT),
    )


def check_exception(claims: Claims, folder: Path, text: Path, expected: RunDir) -> None:
    run, raised = RunDir(folder / "raised"), "nothing"

    def fail(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == STOP_AT:
            raise ZeroDivisionError("of the callback")

    try:
        called(text, run.path, fail)
    except ZeroDivisionError as error:
        raised = repr(error)
    latest = (run.checkpoints / "latest").read_text().strip()
    claims.check(
        f"an exception in a callback at step {STOP_AT}: {raised}; the newest checkpoint",
        bound=f"step-{STOP_AT:08}",
        measured=latest,
        ok=latest == f"step-{STOP_AT:08}" and raised == "ZeroDivisionError('of the callback')",
    )
    package.resume(run.path, display=None)
    same = equal(run, expected, stopped_at=STOP_AT)
    claims.check("resumed after it: the unbroken run's bits", bound="equal", measured="equal" if same else "DIFFERENT", ok=same)


def check_thread(claims: Claims, folder: Path, text: Path, expected: RunDir) -> None:
    run, failures = RunDir(folder / "thread"), list[BaseException]()

    def work() -> None:
        try:
            called(text, run.path)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    ok = not failures and equal(run, expected)
    claims.check("in a thread that is not the main one", bound="the same bits", measured=failures or "the same bits", ok=ok)


if __name__ == "__main__":
    claims = Claims("train_call")
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), dict(os.environ)
    with scratch() as folder:
        text = folder / "text.txt"
        text.write_text("every forward has its backward, and every backward has its judges\n" * 2000)
        expected = check_same(claims, folder, text)
        check_stop(claims, folder, text, expected)
        check_exception(claims, folder, text, expected)
        check_thread(claims, folder, text, expected)
    after = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), dict(os.environ)
    changed = sorted(name for name in {**before[2], **after[2]} if before[2].get(name) != after[2].get(name))
    claims.check(
        "threads, determinism and changed environment variables after all of it",
        bound=(*before[:2], []),
        measured=(*after[:2], changed),
        ok=before == after,
    )
    claims.finish()
