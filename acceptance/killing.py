"""Kill a run at a random moment and go on with it, as a person would; what the scripts about lost processes share."""

import random
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from training import command, environment

from tapeless.data.files import file_sha256
from tapeless.train.run_dir import RunDir

KINDS = ("step", "watch", "eval", "sample", "checkpoint")  # lines of the metrics that must not feel a kill


def start(*arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command("train", *arguments), env=environment(1), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def to_the_end(*arguments: object) -> None:
    if (code := start(*arguments).wait()) != 0:
        raise SystemExit(f"tapeless train {arguments[0]} failed with exit status {code}")


def go_on(run: RunDir, flags: Sequence[object]) -> list[object]:
    """The command that a person would type now."""
    if run.config.is_file():
        return ["resume", run.path]
    shutil.rmtree(run.path, ignore_errors=True)
    return ["new", *flags, "--out-dir", run.path]


def fingerprint(run: RunDir) -> dict[str, str]:
    latest = run.checkpoints / (run.checkpoints / "latest").read_text().strip()
    return {name: file_sha256(latest / name) for name in ("model.safetensors", "optim.safetensors", "state.json")}


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
    to_the_end(*go_on(run, flags))
    return run, told
