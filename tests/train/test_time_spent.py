"""Where a loop's time goes: exclusive by activity, complete."""

import pytest

from tapeless.training import time_spent
from tapeless.training.time_spent import TimeSpent


def test_nested_activities_count_once_and_nothing_is_missing(monkeypatch: pytest.MonkeyPatch):
    clock = [100.0]
    monkeypatch.setattr(time_spent.time, "perf_counter", lambda: clock[0])
    spent = TimeSpent()
    clock[0] += 1
    with spent("evaluation"):
        clock[0] += 2
        with spent("checkpoints"):
            clock[0] += 4
        clock[0] += 8
    clock[0] += 16
    assert spent.seconds() == {"other": 17, "evaluation": 10, "checkpoints": 4}
    spent.restart()

    def fail() -> None:
        clock[0] += 32
        raise KeyError

    with pytest.raises(KeyError), spent("step"):
        fail()
    clock[0] += 64
    assert spent.seconds() == {"step": 32, "other": 64}
