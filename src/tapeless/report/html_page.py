"""report.html, written while the run goes on: after evaluations, checkpoints and samples, and at its end.

Tested by: tests/report/test_html_page.py."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from tapeless.data.files import atomic_write
from tapeless.report.history import RunHistory
from tapeless.report.page import render
from tapeless.report.reporters import Event, Reporter
from tapeless.training.run_dir import RunDir

NEWS = ("eval", "checkpoint", "sample", "guard", "start", "resume")  # after which the page is written with the next step
SHARE = 0.005  # of the time, at most, goes into writing it


class HtmlPage(Reporter):
    def __init__(self, run: RunDir):
        self.run, self.story = run, RunHistory(run)
        self._news = False
        self._next = 0.0  # when it may be written again

    def begin(self, history: Iterable[Event]) -> None:
        for event in history:
            self.story.take(event)

    def event(self, event: Event) -> None:
        self.story.take(event)
        self._news |= event["event"] in NEWS
        last = event["event"] == "end" or "error" in event
        if last or (self._news and event["event"] == "step" and time.monotonic() >= self._next):
            self._write()

    def close(self) -> None:
        if self._news:
            self._write()

    def _write(self) -> None:
        begun = time.monotonic()
        write_page(self.run.report, [self.story])
        now = time.monotonic()
        self._news, self._next = False, now + (now - begun) / SHARE


def write_page(path: Path, stories: Sequence[RunHistory], names: Sequence[str] | None = None) -> None:
    with atomic_write(path) as file:
        file.write(render(stories, names).encode(errors="replace"))
