"""A small run that several tests read, made once, through the command line."""

import contextlib
import io
import os
import shlex
from pathlib import Path

import pytest

from tapeless.cli.main import main

VERSE = "{n} bottles of beer on the wall, {n} bottles of beer; take one down, pass it around.\n"
SMALL = shlex.split("--hidden-dim 16 --num-layers 1 --num-heads 2 --intermediate-dim 32 --vocab-size 256 --max-seq-len 32")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def quietly(*words: str) -> tuple[int, str]:
    """Exit status and stdout of a command, for fixtures that have no capsys."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = main(list(words))
    return status, out.getvalue()


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "training_data.txt"
    path.write_text("".join(VERSE.format(n=n) for n in range(99, 0, -1)))
    return path


@pytest.fixture(scope="session")
def trained(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run and what it printed."""
    run = tmp_path_factory.mktemp("runs") / "small"
    words = ["--dataset-path", str(text_file), "--out-dir", str(run), "--batch-size", "4", "--max-steps", "40", "--lr", "0.01"]
    intervals = ["--eval-every", "20", "--save-every", "20", "--sample-every", "20", "--sample-tokens", "20"]
    status, out = quietly("train", "new", *SMALL, *words, *intervals)
    assert status == 0
    return run, out
