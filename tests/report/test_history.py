"""What is told of a run: all of it, in little room."""

import json
import logging
import math
from itertools import pairwise
from pathlib import Path

import pytest
from report_fixtures import (
    GROUPS,
    course,
    empty_run,
    eval_event,
    history_of,
    layer_stats_event,
    logged_run,
    loss_at,
    step_event,
)

from tapeless.report.history import SAMPLES, RunHistory


def test_a_short_run_is_told_step_by_step(tmp_path: Path):
    data = history_of(tmp_path / "run", 300).data()
    assert data["steps"]["step"] == [*range(1, 301)]
    assert data["steps"]["loss"]["mean"] == pytest.approx([loss_at(step) for step in range(1, 301)], rel=1e-4)
    assert data["steps"]["seconds"][-1] == pytest.approx(15)
    assert data["evals"]["ema_val_loss"]["mean"] == [None, None, None]
    assert data["evals"]["step"] == [100, 200, 300]
    assert data["evals"]["tokens"] == [51200, 102400, 153600]
    assert data["layers"]["step"] == [1, 50, 100, 150, 200, 250, 300]
    assert data["layers"]["groups"] == GROUPS
    assert data["layers"]["update_ratio"][1] == [5e-4] * 7
    assert data["memory"]["bytes"]["mean"][-1] == pytest.approx(4e8)


def test_the_clip_rate_is_the_share_of_clipped_steps(tmp_path: Path):
    history = RunHistory(empty_run(tmp_path / "run", grad_clip=1.0))
    for step in range(1, 41):
        history.add(step_event(step, grad_norm=1.5 if step <= 5 or step > 30 else 1.0))
    rate = history.data()["clip_rate"]
    assert rate["step"] == [10, 20, 30, 40]
    assert rate["rate"]["mean"] == [0.5, 0, 0, 1]  # a norm of exactly the limit is not clipped


def test_reading_again_tells_the_same(tmp_path: Path):
    """What a resume reads from metrics.jsonl, and what was told event by event."""
    run = logged_run(tmp_path / "run", 1500)
    history = RunHistory(run)
    for event in course(1500):
        history.add(event)
    assert RunHistory.read(run).data() == history.data()
    assert RunHistory.read(run).samples == history.samples


def test_samples_from_first_to_last(tmp_path: Path):
    history = RunHistory(empty_run(tmp_path / "run"))
    for step in range(1, 1001):
        history.add({"event": "sample", "step": step, "text": "x" * 5000})
        kept = [s for s, _ in history.samples]
        assert len(kept) <= SAMPLES + 1
        assert kept[0] == 1
        assert kept[-1] == step
        assert kept == sorted(set(kept))
    assert len({b - a for a, b in pairwise(kept[:-1])}) == 1  # evenly
    assert max(len(text) for _, text in history.samples) == 2000


def test_numbers_that_are_none(tmp_path: Path):
    """metrics.jsonl has them as text."""
    history = RunHistory(empty_run(tmp_path / "run"))
    history.add(step_event(1))
    history.add(layer_stats_event(1, grad_norm={"embed": "NaN"}, update_ratio={"embed": "Infinity"}))
    history.add(eval_event(1, 3.0))
    history.add(eval_event(2, math.nan) | {"val_loss": "NaN"})
    data = history.data()
    assert data["evals"]["val_loss"]["mean"] == [3, None]
    assert data["layers"]["grad_norm"] == [[None]]
    assert history.best_eval["step"] == 1
    assert history.best_ema == {}
    history.add(eval_event(3, 2.0) | {"ema_val_loss": 1.5})
    assert history.data()["evals"]["ema_val_loss"]["mean"] == [None, None, 1.5]
    json.dumps(data, allow_nan=False)


def test_how_it_ended(tmp_path: Path):
    history = RunHistory(empty_run(tmp_path / "run"))
    assert history.ending is None
    history.add({"event": "end", "step": 3, "reason": "stopped"})
    assert history.ending == "stopped"
    history.add({"event": "resume", "step": 3, "changes": {"lr": [0.1, 0.2]}, "time": 1.7e9})
    assert history.ending is None
    history.add({"event": "guard", "step": 4, "warning": "slow"})
    assert history.ending is None
    history.add({"event": "guard", "step": 4, "error": "NaN"})
    assert history.ending == "diverged"
    assert history.notes == [(3, "resumed, lr 0.1 -> 0.2"), (4, "slow"), (4, "NaN")]


@pytest.mark.parametrize("content", [None, "[" * 100_000, "[]", "\udcff"], ids=["missing", "nested", "a list", "no text"])
def test_an_env_json_that_cannot_be_read_is_said(content: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run = empty_run(tmp_path / "run")
    run.env.unlink()
    if content is not None:
        run.env.write_text(content, errors="surrogateescape")
    with caplog.at_level(logging.WARNING, "tapeless"):
        assert RunHistory.read(run).environment == {}
    (said,) = caplog.messages
    assert said.startswith(f"{run.env} cannot be read: ")


def test_a_run_that_never_began(tmp_path: Path):
    data = RunHistory.read(empty_run(tmp_path / "run")).data()
    assert data["steps"]["step"] == data["evals"]["step"] == data["layers"]["step"] == []
