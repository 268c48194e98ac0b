"""Kill commands at random moments and go on with them, as a person would; what the scripts about lost processes share."""

import random
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from training import command, environment, fingerprint, lines

from tapeless.training.run_dir import RunDir

KINDS = ("step", "layer_stats", "eval", "sample", "checkpoint")  # lines of the metrics that must not feel a kill


def start(*arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command("train", *arguments), env=environment(1), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def to_the_end(*arguments: object) -> None:
    if (code := start(*arguments).wait()) != 0:
        raise SystemExit(f"tapeless train {arguments[0]} failed with exit status {code}")


def restore_trainer(run: RunDir, flags: Sequence[object]) -> list[object]:
    """The command that a person would type now."""
    if run.config.is_file():
        return ["resume", run.path]
    shutil.rmtree(run.path, ignore_errors=True)
    return ["new", *flags, "--out-dir", run.path]


class Killed(NamedTuple):
    told: int  # lines it had written when it was killed
    equal: bool  # hashes and lines in the end are those of the unbroken run


def killed_runs(folder: Path, flags: Sequence[object], kills: int, draw: random.Random) -> tuple[RunDir, list[Killed]]:
    """An unbroken run, and so many others that are each killed once, at a moment drawn over all of its time."""
    expected, killed, attempts = RunDir(folder / "unbroken"), [], 0
    began = time.monotonic()
    to_the_end("new", *flags, "--out-dir", expected.path)
    whole = time.monotonic() - began
    while len(killed) < kills:
        attempts += 1
        resumed = killed_once(folder / f"killed-{attempts}", flags, draw, whole)
        if resumed is None:
            continue
        run, told = resumed
        same = fingerprint(run) == fingerprint(expected) and lines(run, *KINDS) == lines(expected, *KINDS)
        killed.append(Killed(told, same))
        print(f"      kill {len(killed)}, {told} lines written: {'equal' if same else 'DIFFERENT'}", flush=True)
    return expected, killed


def killed_once(folder: Path, flags: Sequence[object], draw: random.Random, seconds: float) -> tuple[RunDir, int] | None:
    """Killed after a random time, and resumed to its end; with the lines it had when it was killed. None where it was through
    before that."""
    run = RunDir(folder)
    process = start("new", *flags, "--out-dir", run.path)
    try:
        process.wait(draw.uniform(0.0, seconds))
        return None
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    told = run.metrics.read_bytes().count(b"\n") if run.metrics.exists() else 0
    to_the_end(*restore_trainer(run, flags))
    return run, told
