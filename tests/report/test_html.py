"""report.html while a run goes on: written when there is news, not more often than it is worth, whole at any moment."""

from pathlib import Path

import pytest
from report_fixtures import course, empty_run, step_event

from tapeless.report import page
from tapeless.report.reporters import html
from tapeless.report.reporters.html import HtmlReporter
from tapeless.training.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return empty_run(tmp_path / "run")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of the run when its page was written."""
    steps: list[int] = []
    monkeypatch.setattr(html, "write_page", lambda path, histories: steps.append(histories[0].last.get("step", 0)))
    return steps


def test_after_evaluations_and_at_the_end(run: RunDir, written: list[int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(html, "SHARE", 1e9)
    reporter = HtmlReporter(run)
    for event in course(250):
        reporter.event(event)
    reporter.close()
    assert written == [1, 101, 201, 250]


def test_it_takes_no_more_than_its_share(run: RunDir, written: list[int], monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr(html.time, "monotonic", lambda: now)

    def slow(path: Path, histories: list) -> None:
        nonlocal now
        now += 0.05
        written.append(histories[0].last["step"])

    monkeypatch.setattr(html, "write_page", slow)
    reporter = HtmlReporter(run)
    for event in course(10_000):
        now += 0.01 if event["event"] == "step" else 0.0
        reporter.event(event)
    assert len(written) >= 8
    assert 0.05 * len(written) <= 0.01 * now
    assert written[-1] == 10_000


def test_the_history_of_a_resumed_run_is_not_written_event_by_event(run: RunDir, written: list[int]):
    reporter = HtmlReporter(run)
    reporter.begin(course(1000))
    assert written == []
    reporter.event({"event": "resume", "step": 1000, "changes": {}, "time": 1.7e9})
    reporter.event(step_event(1001))
    assert written == [1001]


def test_a_divergence_is_told_at_once(run: RunDir, written: list[int]):
    reporter = HtmlReporter(run)
    reporter.event(step_event(1))
    reporter.event({"event": "guard", "step": 2, "error": "loss NaN"})
    assert written == [1]


def test_a_stop_between_leaves_the_news_told(run: RunDir, written: list[int]):
    reporter = HtmlReporter(run)
    reporter.event(step_event(1))
    reporter.event({"event": "checkpoint", "step": 1, "path": "step-00000001"})
    reporter.close()
    assert written == [1]


def test_a_failure_leaves_the_page_before(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    reporter = HtmlReporter(run)
    reporter.event({"event": "end", "step": 0, "reason": "done"})
    before = run.report.read_bytes()

    def broken(*_: object) -> str:
        raise OSError("no space left on device")

    monkeypatch.setattr(page, "render", broken)
    with pytest.raises(OSError, match="no space"):
        reporter.event({"event": "end", "step": 0, "reason": "done"})
    assert run.report.read_bytes() == before
    assert [path.name for path in run.path.glob(".tmp*")] == []
