"""What report_to names is told everything, once, and cannot stop a run."""

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from report_fixtures import empty_run, step_event, told_run

from tapeless.config import REPORTERS as NAMES
from tapeless.config import TrainConfig
from tapeless.errors import ConfigError, MissingError
from tapeless.report import reporters
from tapeless.report.reporters import PACKAGES, REPORTERS, Reporter, Reporters, check_packages
from tapeless.training.metrics_log import MetricsLog, read_metrics
from tapeless.training.run_dir import RunDir


class Memory(Reporter):
    """Remembers what it is told."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.told: list[Any] = []
        self.closed, self.fails_at = False, fails_at

    def event(self, event: Any) -> None:
        if event["step"] == self.fails_at:
            raise OSError("no space left on device")
        self.told.append(event)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> dict[str, Memory]:
    living = {"html": Memory(), "csv": Memory(fails_at=302)}
    monkeypatch.setattr(reporters, "REPORTERS", {name: lambda run, name=name: living[name] for name in living})
    return living


def test_the_configuration_knows_the_same_names():
    assert tuple(REPORTERS) == NAMES


def test_a_reporter_without_an_event_is_none():
    with pytest.raises(TypeError, match="abstract"):
        Reporter()


@pytest.mark.parametrize("name", PACKAGES)
def test_what_is_not_installed_is_known_before_anything_is_made(name: str, monkeypatch: pytest.MonkeyPatch):
    check_packages("html,csv")
    check_packages("none")
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingError, match=rf"report_to {name}: .* not installed; pip install 'tapeless\[{name}\]'"):
        check_packages(f"html,{name}")


def test_the_past_comes_first_then_what_comes(tmp_path: Path, two: dict[str, Memory]):
    run = told_run(tmp_path / "run", 300)
    history = list(read_metrics(run.metrics))
    with Reporters(run, "html") as all_of_them:
        all_of_them.event(step_event(301))
    assert two["html"].told == [*history, step_event(301)]
    assert two["html"].closed
    assert two["csv"].told == []


def test_one_that_fails_is_given_up_and_said_and_the_others_go_on(
    tmp_path: Path, two: dict[str, Memory], caplog: pytest.LogCaptureFixture
):
    run = empty_run(tmp_path / "run")
    MetricsLog(run.metrics).close()
    with caplog.at_level(logging.WARNING, "tapeless"), Reporters(run, "csv,html") as all_of_them:
        for step in (301, 302, 303):
            all_of_them.event(step_event(step))
    assert [event["step"] for event in two["html"].told] == [301, 302, 303]
    assert [event["step"] for event in two["csv"].told] == [301]
    assert caplog.messages == ["report_to csv is given up, OSError: no space left on device; the run goes on"]


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
