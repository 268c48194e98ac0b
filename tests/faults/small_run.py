"""A run that takes a fraction of a second and does everything a run does: save, rotate, evaluate, mark the best, sample.

What it must come to, however often it is interrupted: `outcome`."""

import io
import shlex
import shutil
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

from run_fixtures import events, text_file

from tapeless.cli.main import main
from tapeless.data.files import file_sha256
from tapeless.training.run_dir import RunDir

FILES = ("model.safetensors", "optim.safetensors", "state.json")
FLAGS = shlex.split(
    "--hidden-dim 16 --num-layers 1 --num-heads 2 --intermediate-dim 24 --max-seq-len 8 --batch-size 2 --no-verify "
    "--ops reference --lr 0.01 --max-steps 6 --save-every 2 --eval-every 3 --sample-every 3 --sample-tokens 5 --keep-last 1"
)


class Said(NamedTuple):
    status: int
    words: str  # stdout and stderr


def new(run: RunDir, *flags: str) -> Said:
    data = run.path.parent / "text.txt"
    if not data.exists():
        text_file(run.path.parent, 700)
    return command("new", *FLAGS, "--dataset-path", str(data), "--out-dir", str(run.path), *flags)


def resume(run: RunDir, *flags: str) -> Said:
    return command("resume", str(run.path), *flags)


def restore_trainer(run: RunDir, *flags: str) -> Said:
    """What a person would type now."""
    if run.config.is_file():
        return resume(run)
    shutil.rmtree(run.path, ignore_errors=True)
    return new(run, *flags)


def command(*words: str) -> Said:
    with redirect_stdout(io.StringIO()) as said, redirect_stderr(said):
        status = main(["train", *words])
    return Said(status, said.getvalue())


def outcome(run: RunDir, kinds: tuple[str, ...] = ("step", "eval", "sample")) -> dict[str, Any]:
    """What must not depend on what went wrong on the way: the last checkpoint, and the lines but for their times. That of a
    checkpoint is not there where the disk would not take it."""
    latest = run.checkpoints / (run.checkpoints / "latest").read_text().strip()
    return {name: file_sha256(latest / name) for name in FILES} | {"lines": events(run, kinds)}


def content(run: RunDir) -> dict[str, dict[str, str]]:
    """The hashes of every checkpoint that is under its own name."""
    return {path.name: {name: file_sha256(path / name) for name in FILES} for path in run.checkpoints.glob("step-????????")}
