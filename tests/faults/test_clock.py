"""A clock that jumps, forwards, backwards and out of every calendar: it is written down, and nothing depends on it."""

import itertools
import time
from pathlib import Path

import pytest
from small_run import command, new, outcome, resume

from tapeless.training.run_dir import RunDir

JUMPS = [0.0, 4.1e9, -1e10, 1.7e9, 1e17, -1e17, 2.0**31, 1.7e9]  # 1970, 2099, long ago, now, never, never, 2038, now


def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    expected, run = RunDir(tmp_path / "expected"), RunDir(tmp_path / "run")
    assert new(expected).status == 0
    for first in range(len(JUMPS)):
        times = itertools.cycle(JUMPS[first:] + JUMPS[:first])
        other = RunDir(tmp_path / f"run-{first}")
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda times=times: next(times))
            assert new(other, "--max-steps", "3", "--lr-schedule", "constant").status == 0
            info = command("info", str(other.path))
            assert info.status == 0, info.words
            said = resume(other, "--override", "max_steps=6", "--override", "lr_schedule=warmup-cosine")
        assert said.status == 0, said.words
    with monkeypatch.context() as patch:
        times = itertools.cycle(JUMPS)
        patch.setattr(time, "time", lambda: next(times))
        assert new(run).status == 0
    assert outcome(run) == outcome(expected)
