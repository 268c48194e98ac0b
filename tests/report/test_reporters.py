"""Reporters receive every event once, and cannot stop a run."""

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from report_fixtures import empty_run, logged_run, step_event

from tapeless.config import REPORTERS, TrainConfig
from tapeless.errors import ConfigError, MissingError
from tapeless.report.reporters import Reporter, Reporters, check_packages
from tapeless.training.metrics_log import MetricsLog, read_metrics
from tapeless.training.run_dir import RunDir


class Memory(Reporter):
    """Remembers its events."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.events: list[Any] = []
        self.closed, self.fails_at = False, fails_at

    def event(self, event: Any) -> None:
        if event["step"] == self.fails_at:
            raise OSError("no space left on device")
        self.events.append(event)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> dict[str, Memory]:
    living = {"html": Memory(), "csv": Memory(fails_at=302)}
    monkeypatch.setattr(REPORTERS, "_entries", {name: lambda run, name=name: living[name] for name in living})
    return living


def test_a_reporter_from_outside_is_used_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = []

    class Mine(Memory):
        def __init__(self, run: RunDir) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(REPORTERS, "_entries", dict(REPORTERS._entries))
    REPORTERS.register("mine", Mine)
    names = TrainConfig(report_to="mine,csv").report_to
    check_packages(names)
    run = logged_run(tmp_path / "run", 2)
    with Reporters(run, names) as all_of_them:
        all_of_them.event(step_event(3))
    assert made[0].events[-1] == step_event(3)


def test_every_entry_can_be_imported():
    assert all(issubclass(REPORTERS[name], Reporter) for name in REPORTERS)


def test_one_that_cannot_be_made_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run = logged_run(tmp_path / "run", 2)
    (run.path / "metrics.csv").mkdir()
    with caplog.at_level(logging.WARNING, "tapeless"), Reporters(run, "csv"):
        pass
    assert ["report_to csv stopped, IsADirectoryError" in message for message in caplog.messages] == [True]


def test_a_reporter_without_an_event_is_none():
    with pytest.raises(TypeError, match="abstract"):
        Reporter(RunDir(Path()))


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_what_is_not_installed_is_known_before_anything_is_made(name: str, monkeypatch: pytest.MonkeyPatch):
    check_packages("html,csv")
    check_packages("none")
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingError, match=rf"report_to {name}: .* not installed; pip install 'tapeless\[{name}\]'"):
        check_packages(f"html,{name}")


def test_the_history_comes_first_then_new_events(tmp_path: Path, two: dict[str, Memory]):
    run = logged_run(tmp_path / "run", 300)
    history = list(read_metrics(run.metrics))
    with Reporters(run, "html") as all_of_them:
        all_of_them.event(step_event(301))
    assert two["html"].events == [*history, step_event(301)]
    assert two["html"].closed
    assert two["csv"].events == []


def test_one_that_fails_is_dropped_with_a_warning_and_the_others_continue(
    tmp_path: Path, two: dict[str, Memory], caplog: pytest.LogCaptureFixture
):
    run = empty_run(tmp_path / "run")
    MetricsLog(run.metrics).close()
    with caplog.at_level(logging.WARNING, "tapeless"), Reporters(run, "csv,html") as all_of_them:
        for step in (301, 302, 303):
            all_of_them.event(step_event(step))
    assert [event["step"] for event in two["html"].events] == [301, 302, 303]
    assert [event["step"] for event in two["csv"].events] == [301]
    assert caplog.messages == ["report_to csv stopped, OSError: no space left on device; training continues"]


def test_none_is_none(tmp_path: Path):
    run = RunDir(tmp_path)
    with Reporters(run, "none") as nobody:
        nobody.event(step_event(1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("names", ["htm", "html,", "html,none", "html, csv", ""])
def test_names_are_checked(names: str):
    with pytest.raises(ConfigError, match="report_to"):
        TrainConfig(report_to=names)
    for good in ("none", "html", "csv,tensorboard", "html,csv,tensorboard,wandb,trackio"):
        assert TrainConfig(report_to=good).report_to == good
