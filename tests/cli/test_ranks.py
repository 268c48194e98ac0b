"""Commands where the environment speaks of ranks: those that train, those that do not, and one that is started again."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tapeless.cli.main import main
from tapeless.dist import launch
from tapeless.start import num_ranks, own_rank

SIGKILL = 9


def started_as(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def test_a_cluster_that_sets_a_size_alone_has_started_no_ranks(monkeypatch: pytest.MonkeyPatch):
    started_as(monkeypatch, WORLD_SIZE=4)
    assert (num_ranks(), own_rank()) == (1, 0)
    started_as(monkeypatch, WORLD_SIZE="", RANK="")
    assert (num_ranks(), own_rank()) == (1, 0)
    started_as(monkeypatch, WORLD_SIZE=4, RANK=3)
    assert (num_ranks(), own_rank()) == (4, 3)


def test_other_commands_print_whatever_their_rank():
    environment = os.environ | {"WORLD_SIZE": "2", "RANK": "1"}
    words = [sys.executable, "-m", "tapeless", "presets", "--help"]
    assert subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
    words = [sys.executable, "-m", "tapeless", "data", "sample", "no/such/folder"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error[")


def test_ranks_are_not_started_by_one_of_others(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    started_as(monkeypatch, WORLD_SIZE=4, RANK=0)
    assert main(["train", "new", "--ranks", "2"]) == 2
    assert "--ranks 2, but this is one of 4 ranks already" in capsys.readouterr().err


def test_torchrun_may_restart_only_what_it_finds_again(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    started_as(monkeypatch, TORCHELASTIC_MAX_RESTARTS=3)
    assert main(["train", "new"]) == 2
    assert "--out-dir: give one" in capsys.readouterr().err


def test_a_restart_continues_its_own_run_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The flags of the start are in the run already; a run of another command is not touched."""
    words = ["train", "new", "--preset", "tiny", "--lr", "0.001", "--out-dir", str(tmp_path)]
    resumed: list[dict[str, Any]] = []
    created: list[str] = []

    class Ended(Exception):
        reason = "done"

    def resume(run: Path, **options: Any) -> type[Ended]:
        resumed.append({"run": run, **options})
        return Ended

    monkeypatch.setattr("tapeless.runner.resume", resume)
    monkeypatch.setattr("tapeless.runner.train", lambda *_, **options: created.append(options["name"]) or Ended)
    started_as(monkeypatch, TORCHELASTIC_RESTART_COUNT=1, TORCHELASTIC_MAX_RESTARTS=3)
    (tmp_path / "config.toml").touch()
    for of_run, expected in ((words, 1), ([*words, "--seed", "1"], 0)):
        (tmp_path / "env.json").write_text(json.dumps({"argv": ["tapeless", *of_run]}))
        resumed.clear()
        created.clear()
        assert main(words) == 0
        assert (len(resumed), len(created)) == (expected, 1 - expected)
        assert all(set(found) == {"run", "display", "phases"} for found in resumed)


def test_starts_that_come_no_further_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Every start is the same command, with its plugins and changes, and knows that it is not the first."""
    started_as(monkeypatch)
    latest = tmp_path / "checkpoints" / "latest"
    latest.parent.mkdir()
    started: list[tuple[list[str], int]] = []

    class Killed:
        signalled, ended_first = False, 1

        def __init__(self, arguments: list[str], ranks: int, *, restarts: int):
            started.append((arguments, restarts))

        def run(self) -> int:
            if len(started) <= 2:
                latest.write_text(f"step {len(started)}")
            return -SIGKILL

    monkeypatch.setattr(launch, "_Group", Killed)
    words = ["--verbose", "train", "resume", str(tmp_path), "--ranks", "2", "--lr", "0.1"]
    assert main(words) == 1
    assert started == [(words, n) for n in range(2 + launch.ATTEMPTS)]
    assert "rank 1 was ended by SIGKILL; 3 starts have saved no further step" in capsys.readouterr().err
