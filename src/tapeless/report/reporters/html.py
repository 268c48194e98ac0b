"""report.html, written during the run: after evaluations, checkpoints and samples, and at the end.

Tested by: tests/report/test_html.py."""

import time
from collections.abc import Iterable

from tapeless.report.history import RunHistory
from tapeless.report.metrics import Event
from tapeless.report.page import write_page
from tapeless.report.reporters import Reporter
from tapeless.training.run_dir import RunDir

NEWS = ("eval", "checkpoint", "sample", "guard", "start", "resume")  # after these the page is written with the next step
SHARE = 0.005  # of the time is the most that is spent on writing it


class HtmlReporter(Reporter):
    def __init__(self, run: RunDir):
        self.run, self.history = run, RunHistory(run)
        self._news = False
        self._next = 0.0  # when it may be written again

    def begin(self, history: Iterable[Event]) -> None:
        for event in history:
            self.history.add(event)

    def event(self, event: Event) -> None:
        self.history.add(event)
        self._news |= event["event"] in NEWS
        last = event["event"] == "end" or "error" in event
        if last or (self._news and event["event"] == "step" and time.monotonic() >= self._next):
            self._write()

    def close(self) -> None:
        if self._news:
            self._write()

    def _write(self) -> None:
        start = time.monotonic()
        write_page(self.run.report, [self.history])
        now = time.monotonic()
        self._news, self._next = False, now + (now - start) / SHARE
