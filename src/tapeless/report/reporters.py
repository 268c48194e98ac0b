"""Where a run is told beside its metrics.jsonl: `--report-to html,csv,tensorboard`.

A reporter is told every event, in order and each once, from the run's beginning: after a resume it starts from nothing and is
first told what metrics.jsonl still holds, so that none needs a memory of its own and none can double or lose a line. Another
one is a class with these three methods and a line in REPORTERS.
Judged by: tests/report/test_reporters.py."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tapeless.train.metrics_log import read_metrics
from tapeless.train.run_dir import RunDir

log = logging.getLogger("tapeless")
Event = Mapping[str, Any]


class Reporter:
    """One place that a run is told to."""

    def begin(self, history: Iterable[Event]) -> None:
        """What the run has told before."""
        for event in history:
            self.event(event)

    def event(self, event: Event) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """The process ends, whether the run does or not."""


def _html(run: RunDir) -> Reporter:
    from tapeless.report.html_page import HtmlPage

    return HtmlPage(run)


def _csv(run: RunDir) -> Reporter:
    from tapeless.report.csv_table import CsvTable

    return CsvTable(run)


def _tensorboard(run: RunDir) -> Reporter:
    from tapeless.report.tensorboard_files import TensorBoardFiles

    return TensorBoardFiles(run)


REPORTERS: dict[str, Callable[[RunDir], Reporter]] = {"html": _html, "csv": _csv, "tensorboard": _tensorboard}


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
