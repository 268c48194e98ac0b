"""Where a run is logged besides its metrics.jsonl: `--report-to html,csv,tensorboard,wandb,trackio`.

A reporter receives every event, in order and each once, from the run's beginning: after a resume it first receives what
metrics.jsonl holds. To add one: a file here with a subclass of Reporter, and a line in config/registry.py.
Tested by: tests/report/test_reporters.py."""

import importlib
import importlib.util
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from tapeless.config import REPORTERS
from tapeless.data.files import write_json
from tapeless.errors import MissingError
from tapeless.regular import read_json
from tapeless.report.metrics import Event
from tapeless.training.metrics_log import copied, read_metrics
from tapeless.training.run_config import read_run_config
from tapeless.training.run_dir import RunDir

log = logging.getLogger("tapeless")
PROJECT = "tapeless"  # in W&B and Trackio


class Reporter(ABC):
    requires: str | None = None  # the package it needs, which is also the name of the extra that installs it

    @abstractmethod
    def __init__(self, run: RunDir): ...

    def begin(self, history: Iterable[Event]) -> None:
        """The events that metrics.jsonl holds."""
        for event in history:
            self.event(event)

    @abstractmethod
    def event(self, event: Event) -> None:
        """A new event."""

    def close(self) -> None:  # noqa: B027  optional
        """The process ends, or the reporter failed."""


class ServiceReporter(Reporter):
    """A reporter to a service with runs of its own, which a resumed process continues: the id there and the last step sent are
    in a file of the run's directory."""

    def __init__(self, run: RunDir):
        self.run, self.package = run, package(str(self.requires))
        self._state = run.path / f"{self.requires}.json"
        self._step = -1  # the last one sent

    def begin(self, history: Iterable[Event]) -> None:
        state: dict[str, Any] = {"id": uuid.uuid4().hex[:8], "step": -1}
        if self._state.exists():
            state = read_json(self._state)
        self._id, self._step = state["id"], state["step"]
        first = self.open(self._id, self.run.path.resolve().name, read_run_config(self.run.config).tables())
        self._save()
        for event in history:
            if event.get("step", 0) >= first:
                self.event(event)

    @abstractmethod
    def open(self, run_id: str, name: str, config: dict[str, Any]) -> int:
        """Start or continue a run. Returned is the first step of the history to send."""

    @abstractmethod
    def send(self, event: Event) -> None: ...

    def event(self, event: Event) -> None:
        self.send(event)
        self._step = max(self._step, event.get("step", self._step))  # a checkpoint's event comes when it is written
        if event["event"] == "checkpoint":
            self._save()

    def _save(self) -> None:
        write_json(self._state, {"id": self._id, "step": self._step})


def check_packages(names: str) -> None:
    """Whether the packages that TrainConfig.report_to needs are installed: checked before anything is made, read or changed."""
    for name in names.split(",") if names != "none" else ():
        requires = REPORTERS[name].requires
        if requires and importlib.util.find_spec(requires) is None:
            raise _missing(requires, f"the package {requires} is not installed")


def package(name: str, module: str | None = None) -> Any:
    """The package that a reporter needs, or one of its modules, imported when the reporter is made."""
    try:
        return importlib.import_module(module or name)
    except ImportError as error:
        raise _missing(name, error) from None


def _missing(name: str, reason: object) -> MissingError:
    return MissingError(f"report_to {name}: {reason}; pip install 'tapeless[{name}]'")


class Reporters:
    """All reporters of a configuration as one listener. One that fails is dropped with a warning; training continues."""

    def __init__(self, run: RunDir, names: str):
        """names: TrainConfig.report_to."""
        self.run, self._active = run, dict[str, Reporter]()
        for name in dict.fromkeys(names.split(",") if names != "none" else ()):
            self._try(name, lambda name=name: self._active.update({name: REPORTERS[name](run)}))  # type: ignore[misc]

    def __enter__(self) -> "Reporters":
        self._all(lambda reporter: reporter.begin(read_metrics(self.run.metrics)))
        return self

    def __exit__(self, *_: object) -> None:
        self._all(lambda reporter: reporter.close())

    def event(self, event: Event) -> None:
        self._all(lambda reporter: reporter.event(copied(event)))  # a reporter may change its own

    def _all(self, act: Callable[[Reporter], None]) -> None:
        for name, reporter in list(self._active.items()):
            self._try(name, lambda reporter=reporter: act(reporter))  # type: ignore[misc]

    def _try(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            log.warning("report_to %s stopped, %s: %s; training continues", name, type(error).__name__, error)
            reporter = self._active.pop(name, None)
            with suppress(Exception):
                if reporter:
                    reporter.close()
