"""A process that may train for so long: it stops at a step, saved, and whoever resumes has that time anew."""

from pathlib import Path

import pytest
from run_fixtures import begin_run, config, events, final_bytes, play

from tapeless.config import TrainConfig, seconds
from tapeless.errors import ConfigError
from tapeless.training import trainer as module
from tapeless.training.checkpoint import pointed
from tapeless.training.run_dir import RunDir


class Clock:
    """A second passes with every look at it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "monotonic", clock)
    return clock


@pytest.mark.parametrize(("text", "expected"), [("90s", 90), ("10m", 600), ("2h", 7200), ("1.5h", 5400), ("0.25s", 0.25)])
def test_times_as_people_write_them(text: str, expected: float):
    assert seconds(text) == expected
    assert TrainConfig(max_time=text).max_time == text


def test_zero_is_no_limit():
    assert seconds("0") == float("inf")
    assert TrainConfig().max_time == "0"


@pytest.mark.parametrize("text", ["", "90", "10 m", "-1s", "1d", "m", "1h30m", "1e3s", "inf", "nans"])
def test_what_is_no_time_is_refused(text: str):
    with pytest.raises(ConfigError, match="max_time must be a number of s, m or h"):
        TrainConfig(max_time=text)


@pytest.mark.usefixtures("clock")
def test_it_stops_at_a_step_and_goes_on_as_if_it_had_not(tmp_path: Path):
    expected = begin_run(tmp_path / "unbroken", config())
    play(expected)
    run, processes, reached = begin_run(tmp_path / "run", config(max_time="5s")), 0, [0]
    while True:
        ending, trainer = play(run, resume=processes > 0)
        processes += 1
        reached.append(trainer.steps)
        assert pointed(run.checkpoints, "latest") == trainer.steps
        if ending == "done":
            break
        assert ending == "stopped"
        assert trainer.out_of_time
    assert processes >= 3
    assert reached == sorted(reached)
    assert final_bytes(run) == final_bytes(expected)
    assert events(run, ["step", "eval", "sample"]) == events(expected, ["step", "eval", "sample"])  # the rates among them


@pytest.mark.usefixtures("clock")
def test_inside_an_evaluation_too(tmp_path: Path):
    """One look at the clock when it begins, one before the step, so that the third is inside the evaluation of step 1."""
    run = begin_run(tmp_path / "run", config(max_time="2s", eval_every=1))
    ending, trainer = play(run)
    assert (ending, trainer.steps) == ("stopped", 1)
    assert not events(run, ["eval"])


def test_who_has_time_is_not_stopped(tmp_path: Path):
    ending, trainer = play(begin_run(tmp_path / "run", config(max_time="1h")))
    assert ending == "done"
    assert not trainer.out_of_time


def test_an_end_that_is_reached_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run: RunDir = begin_run(tmp_path / "run", config(max_time="1h"))
    told: list[str] = []
    monkeypatch.setattr(module.time, "monotonic", lambda: 1e9 if told[-1:] == ["sample 12"] else 0.0)
    ending, _ = play(run, on_event=lambda event: told.append(f"{event['event']} {event['step']}"))
    assert ending == "done"
