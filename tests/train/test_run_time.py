"""Where the time of a run went: every second once, also over a kill and a resume."""

from pathlib import Path
from typing import Any

import pytest

from tapeless.training import run_time
from tapeless.training.metrics_log import MetricsLog, read_metrics
from tapeless.training.run_time import RunTime, activity_rows, startup_rows, verdict
from tapeless.training.trainer import REPEATED


def step(number: int, seconds: float) -> dict[str, Any]:
    return {"event": "step", "step": number, "tokens": 64 * number, "step_seconds": seconds}


def spent(number: int, **seconds: float) -> dict[str, Any]:
    return {"event": "time_spent", "step": number, "seconds": seconds}


FIRST = [
    {"event": "start", "step": 0, "startup_seconds": {"imports": 1.0, "data": 0.5}},
    *(step(number, seconds) for number, seconds in enumerate([3.0, 1.0, 0.25, 0.25, 0.75], 1)),
    spent(5, step=5.25, evaluation=0.5, other=0.25),
]
# killed after step 7; its checkpoint was of step 6, so that nothing says what step 6 took beside itself
RESUMED = [
    step(6, 0.25),
    {"event": "resume", "step": 6, "startup_seconds": {"imports": 2.0, "data": 0.25}},
    *(step(number, seconds) for number, seconds in [(7, 2.0), (8, 1.0), (9, 0.25)]),
    spent(9, step=3.25, samples=0.5),
]


def found(events: list[dict[str, Any]]) -> Any:
    times = RunTime()
    for event in events:
        times.add(event)
    return times.found()


def test_a_stopped_process_counts_after_a_resume(tmp_path: Path):
    """A stop saves and says what it spent at the same step: a resume from there keeps it."""
    events = [*FIRST, {"event": "checkpoint", "step": 5}]
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        for event in events:
            log.append(event)
        log.flush()
        log.truncate_to(5, repeated=REPEATED)
    assert found(list(read_metrics(log.path)))["seconds"] == found(events)["seconds"]


def test_the_first_steps_belong_to_the_start():
    one = found(FIRST)
    assert one["startup_seconds"] == {"imports": 1.0, "data": 0.5, "first steps": 4.0}
    assert one["seconds"] == {"step": 1.25, "evaluation": 0.5, "other": 0.25}
    assert (one["steps"], one["median_step_s"], one["wall_per_step_s"]) == (3, 0.25, pytest.approx(2 / 3))
    assert one["ratio"] == pytest.approx(8 / 3)
    assert (one["tokens_per_s"], one["step_tokens_per_s"]) == (pytest.approx(96), 256)


def test_processes_add_up():
    both = found(FIRST + RESUMED)
    assert both["processes"] == 2
    assert both["startup_seconds"] == {"imports": 3.0, "data": 0.75, "first steps": 7.0}
    assert both["seconds"] == {"step": 1.5, "evaluation": 0.5, "samples": 0.5, "other": 0.25}
    assert both["steps"] == 3 + 1


def test_only_the_last_event_of_a_process_counts():
    assert found([*FIRST[:-1], spent(3, step=4.25), FIRST[-1]]) == found(FIRST)


def test_without_these_events_there_is_nothing_to_tell():
    assert found([]) is None
    assert found(FIRST[:-1]) is None
    assert found([*FIRST[:3], spent(2, step=4.0)]) is None


def test_the_median_of_a_long_run_needs_little_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_time, "MOST", 64)
    times = RunTime()
    times.add(FIRST[0])
    for number in range(1, 10_001):
        times.add(step(number, float(number)))
    times.add(spent(10_000, step=5e7))
    assert len(times._times) < 64
    assert times.found()["median_step_s"] == pytest.approx(5000, rel=0.05)  # type: ignore[index]


def test_the_tables_end_with_their_sums():
    one = found(FIRST)
    assert startup_rows(one)[0] == ("start-up", "seconds")
    assert startup_rows(one)[-1] == ("in all", "5.50")
    assert startup_rows(found(FIRST + RESUMED))[0][0] == "start-up, 2 processes"
    assert activity_rows(one)[1] == ("step", "1.25", "62.5%", "416.667")
    assert activity_rows(one)[-1] == ("in all", "2.00", "100.0%", "666.667")
    assert "2.667 of the median step, 250.000 ms; 96 tokens/s; the step alone 256" in verdict(one)
