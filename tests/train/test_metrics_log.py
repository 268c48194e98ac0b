"""metrics.jsonl: each step exactly once, whatever a kill left at the end of the file."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tapeless.errors import DataError
from tapeless.training.metrics_log import MetricsLog, copied, event_line, read_metrics


def written(path: Path, steps: int) -> Path:
    with MetricsLog(path) as log:
        log.append({"event": "start", "time": 1.5})
        for step in range(1, steps + 1):
            log.append({"event": "step", "step": step, "loss": 1 / step})
            if step % 4 == 0:
                log.append({"event": "checkpoint", "step": step})
                log.append({"event": "eval", "step": step, "val_loss": 2 / step})
    return path


def told(path: Path) -> list[tuple[str, int | None]]:
    return [(event["event"], event.get("step")) for event in read_metrics(path)]


def test_events_read_back_in_order(tmp_path: Path):
    path = written(tmp_path / "metrics.jsonl", 5)
    assert told(path) == [
        ("start", None),
        *(("step", n) for n in (1, 2, 3, 4)),
        ("checkpoint", 4),
        ("eval", 4),
        ("step", 5),
    ]
    assert [event["loss"] for event in read_metrics(path) if "loss" in event] == [1 / n for n in range(1, 6)]


@pytest.mark.parametrize("write", [MetricsLog.flush, MetricsLog.sync])
def test_a_line_is_in_the_file_after_a_flush_and_before_a_checkpoint(tmp_path: Path, write: Callable[[MetricsLog], None]):
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        for n in range(1, 4):
            log.append({"event": "step", "step": n, "text": "naïve\n😀"})
            write(log)
            assert len(list(read_metrics(log.path))) == n
    assert list(read_metrics(log.path))[-1]["text"] == "naïve\n😀"


def test_every_line_is_json_whatever_the_numbers(tmp_path: Path):
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.append({"event": "step", "step": 1, "loss": math.nan, "deep": {"grad_norm": [math.inf, -math.inf, 1.0]}})

    def refuse(word: str) -> float:
        pytest.fail(f"{word} is not JSON")

    (line,) = log.path.read_text().splitlines()
    event = json.loads(line, parse_constant=refuse)
    assert math.isnan(float(event["loss"]))
    assert [float(x) for x in event["deep"]["grad_norm"]] == [math.inf, -math.inf, 1.0]


def test_a_resume_drops_later_steps(tmp_path: Path):
    path = written(tmp_path / "metrics.jsonl", 10)
    with MetricsLog(path) as log:
        log.truncate_to(8)
        assert told(path)[-3:] == [("step", 8), ("checkpoint", 8), ("eval", 8)]
        log.append({"event": "step", "step": 9})
    assert [step for event, step in told(path) if event == "step"] == list(range(1, 10))


def test_a_resume_drops_what_it_does_again(tmp_path: Path):
    path = written(tmp_path / "metrics.jsonl", 8)
    with MetricsLog(path) as log:
        log.truncate_to(8, repeated=("eval",))
    assert told(path)[-2:] == [("step", 8), ("checkpoint", 8)]
    assert ("eval", 4) in told(path)


def test_wherever_a_kill_cuts_the_file_each_step_is_there_once(tmp_path: Path):
    """Cut at every byte behind the checkpoint of step 4, resumed from it, and run to the end again."""
    whole = written(tmp_path / "whole.jsonl", 6).read_bytes()
    checkpoint = whole.index(b'{"event": "checkpoint"')
    for cut in range(checkpoint, len(whole) + 1):
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(whole[:cut])
        assert all(isinstance(event, dict) for event in read_metrics(path))
        with MetricsLog(path) as log:
            log.truncate_to(4, repeated=("checkpoint", "eval"))
            log.append({"event": "checkpoint", "step": 4})
            log.append({"event": "eval", "step": 4, "val_loss": 2 / 4})
            for step in (5, 6):
                log.append({"event": "step", "step": step, "loss": 1 / step})
        assert path.read_bytes() == whole


def test_a_kill_while_truncating_leaves_the_old_lines_or_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = written(tmp_path / "metrics.jsonl", 10)
    before = path.read_bytes()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    log = MetricsLog(path)
    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        log.truncate_to(4)
    assert path.read_bytes() == before


def test_damage_in_the_middle_is_named(tmp_path: Path):
    path = written(tmp_path / "metrics.jsonl", 3)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = b"\x00\x00\x00\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(DataError, match=r"metrics\.jsonl:3: expected a line of JSON"):
        list(read_metrics(path))


def test_a_copy_shares_nothing_that_can_change():
    event = {"event": "layer_stats", "step": 1, "grad_norm": {"embed": 1.0}, "changes": {"lr": [1, 2]}}
    copy = copied(event)
    assert copy == event
    copy["grad_norm"]["embed"], copy["step"] = 2.0, 3
    copy["changes"]["lr"].append(3)
    assert event == {"event": "layer_stats", "step": 1, "grad_norm": {"embed": 1.0}, "changes": {"lr": [1, 2]}}


def test_a_line_of_any_text():
    """Also with a file name that is not UTF-8, in a warning."""
    event = {"event": "guard", "warning": "a\udcff.txt é could not be written"}
    assert json.loads(event_line(event)) == event
