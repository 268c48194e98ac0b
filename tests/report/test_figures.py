"""The numbers at the top."""

from pathlib import Path

import pytest
from report_fixtures import empty_run, eval_event, history_of, logged_run

from tapeless.report.figures import figures, short
from tapeless.report.history import RunHistory


def test_of_a_finished_run(tmp_path: Path):
    found = {figure.label: figure[1:] for figure in figures(history_of(tmp_path / "run", 400))}
    assert found["validation loss"] == ("1.6649", "best, at step 400")
    assert found["vs. bigram"] == ("-33.1 %", "bigram 2.4900")
    assert found["steps"] == ("400", "of 400")
    assert found["tokens"] == ("205 k", "epoch 1")
    assert found["tokens per second"] == ("10,240", "20 s in steps")
    assert found["parameters"] == ("833 k", "float32 on cpu")
    assert found["memory"] == ("400 MB", "process")


def test_a_known_entropy_is_the_mark(tmp_path: Path):
    history = RunHistory.read(logged_run(tmp_path / "run", 400, floor=1.5))
    assert ("vs. entropy", "+11.0 %", "entropy 1.5000") in figures(history)


def test_a_last_evaluation_that_is_not_the_best(tmp_path: Path):
    history = history_of(tmp_path / "run", 400)
    history.add(eval_event(500, 1.9))
    assert figures(history)[0].below == "best, at step 400; last 1.9000"


def test_the_average_of_the_weights_has_its_own_best(tmp_path: Path):
    history = history_of(tmp_path / "run", 400)
    for step, loss in ((500, 1.4), (600, 1.5)):
        history.add(eval_event(step, 1.9) | {"ema_val_loss": loss})
    assert figures(history)[1] == ("EMA validation loss", "1.4000", "best, at step 500")


def test_of_a_run_that_never_began(tmp_path: Path):
    assert figures(RunHistory(empty_run(tmp_path / "run"))) == []


@pytest.mark.parametrize(
    ("n", "words"),
    [(0, "0"), (9999, "9,999"), (10_000, "10 k"), (461_312, "461 k"), (1_234_567, "1.23 M"), (2_500_000_000, "2.5 B")],
)
def test_short(n: int, words: str):
    assert short(n) == words
