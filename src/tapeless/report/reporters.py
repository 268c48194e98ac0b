"""Where a run is told beside its metrics.jsonl: `--report-to html,csv,tensorboard,wandb,trackio`.

A reporter is told every event, in order and each once, from the run's beginning: after a resume it starts from nothing and is
first told what metrics.jsonl still holds, so that none needs a memory of its own and none can double or lose a line. Another
one is a class with these three methods and a line in REPORTERS, and in PACKAGES where it needs one.
Tested by: tests/report/test_reporters.py."""

import importlib
import importlib.util
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tapeless.errors import MissingError
from tapeless.training.metrics_log import read_metrics
from tapeless.training.run_dir import RunDir

log = logging.getLogger("tapeless")
Event = Mapping[str, Any]
PACKAGES = ("tensorboard", "wandb", "trackio")  # what these reporters need, each by its own name
PROJECT = "tapeless"  # under which W&B and Trackio file a run


class Reporter(ABC):
    """One place that a run is told to."""

    def begin(self, history: Iterable[Event]) -> None:
        """What the run has told before."""
        for event in history:
            self.event(event)

    @abstractmethod
    def event(self, event: Event) -> None:
        """What happens now."""

    def close(self) -> None:  # noqa: B027  a reporter that holds nothing open needs none
        """The process ends, whether the run does or not."""


def check_packages(names: str) -> None:
    """Whether what TrainConfig.report_to names is installed: asked before anything is made, read or changed."""
    for name in names.split(","):
        if name in PACKAGES and importlib.util.find_spec(name) is None:
            raise _missing(name, f"the package {name} is not installed")


def package(name: str, module: str | None = None) -> Any:
    """The module that a reporter is made of, loaded when it is made."""
    try:
        return importlib.import_module(module or name)
    except ImportError as error:
        raise _missing(name, error) from None


def _missing(name: str, reason: object) -> MissingError:
    return MissingError(f"report_to {name}: {reason}; pip install 'tapeless[{name}]'")


def _html(run: RunDir) -> Reporter:
    from tapeless.report.html_page import HtmlPage

    return HtmlPage(run)


def _csv(run: RunDir) -> Reporter:
    from tapeless.report.csv_table import CsvTable

    return CsvTable(run)


def _tensorboard(run: RunDir) -> Reporter:
    from tapeless.report.tensorboard_files import TensorBoardFiles

    return TensorBoardFiles(run)


def _wandb(run: RunDir) -> Reporter:
    from tapeless.report.wandb_files import WandbFiles

    return WandbFiles(run)


def _trackio(run: RunDir) -> Reporter:
    from tapeless.report.trackio_database import TrackioDatabase

    return TrackioDatabase(run)


REPORTERS: dict[str, Callable[[RunDir], Reporter]] = {
    "html": _html,
    "csv": _csv,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}


class Reporters:
    """All that a configuration names, as one listener. One that fails, whatever the reason, is given up, aloud: the training
    is worth more than its pictures."""

    def __init__(self, run: RunDir, names: str):
        """names: TrainConfig.report_to."""
        self.run = run
        self._living = {name: REPORTERS[name](run) for name in dict.fromkeys(names.split(",")) if name != "none"}

    def __enter__(self) -> "Reporters":
        self._all(lambda reporter: reporter.begin(read_metrics(self.run.metrics)))
        return self

    def __exit__(self, *_: object) -> None:
        self._all(lambda reporter: reporter.close())

    def event(self, event: Event) -> None:
        self._all(lambda reporter: reporter.event(event))

    def _all(self, do: Callable[[Reporter], None]) -> None:
        for name, reporter in list(self._living.items()):
            try:
                do(reporter)
            except Exception as error:
                log.warning("report_to %s is given up, %s: %s; the run goes on", name, type(error).__name__, error)
                del self._living[name]
