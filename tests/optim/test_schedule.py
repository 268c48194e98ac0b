"""Learning rates: values at the corners, the shape between them, and nothing but the step to depend on."""

import math
from itertools import pairwise

import pytest

from tapeless.config import FUNCTION, TrainConfig
from tapeless.optim.schedule import SHAPES, learning_rate

LR, MIN = 0.3, 0.03
FALLING = ["linear", "cosine", "warmup-cosine", "wsd", "polynomial", "restarts"]  # those that end at min_lr


def rates(schedule: str, total: int = 101, warmup: int = 0, lr: float = LR, min_lr: float = MIN) -> list[float]:
    return [
        learning_rate(step, schedule=schedule, total_steps=total, lr=lr, min_lr=min_lr, warmup_steps=warmup)
        for step in range(total)
    ]


def test_the_kinds_are_those_of_the_configuration():
    assert set(TrainConfig.__dataclass_fields__["lr_schedule"].metadata["choices"]) == {*SHAPES, FUNCTION}


@pytest.mark.parametrize("schedule", SHAPES)
def test_begins_at_lr_and_stays_between_the_two(schedule: str):
    values = rates(schedule)
    assert values[0] == LR
    assert all(MIN <= rate <= LR for rate in values)


@pytest.mark.parametrize("total", [2, 7, 101, 1000])
@pytest.mark.parametrize("schedule", FALLING)
def test_ends_at_min_lr(schedule: str, total: int):
    assert rates(schedule, total)[-1] == pytest.approx(MIN, rel=1e-12)
    assert rates(schedule, total + 5, warmup=5)[-1] == pytest.approx(MIN, rel=1e-12)


@pytest.mark.parametrize("schedule", [name for name in SHAPES if name != "restarts"])
def test_never_rises_behind_the_warmup(schedule: str):
    values = rates(schedule, warmup=10)
    assert all(b <= a for a, b in pairwise(values[10:]))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", LR),
        ("linear", (LR + MIN) / 2),
        ("cosine", (LR + MIN) / 2),
        ("polynomial", MIN + (LR - MIN) / 4),
        ("wsd", LR),
        ("step", MIN + (LR - MIN) * 0.1),
    ],
)
def test_the_middle(schedule: str, expected: float):
    assert rates(schedule)[50] == pytest.approx(expected, rel=1e-12)


def test_a_quarter_of_a_cosine():
    assert rates("cosine")[25] == pytest.approx(MIN + (LR - MIN) * (1 + math.sqrt(0.5)) / 2, rel=1e-12)
    assert rates("warmup-cosine") == rates("cosine")


@pytest.mark.parametrize("schedule", SHAPES)
def test_warmup_rises_linearly_to_lr(schedule: str):
    values = rates(schedule, warmup=10)
    assert values[:10] == pytest.approx([LR * k / 10 for k in range(1, 11)], rel=1e-15)
    assert values[10] == LR
    assert values[10:] == rates(schedule, total=91)  # behind it the same as without it


def test_wsd_holds_and_then_falls_in_a_line():
    values = rates("wsd")
    assert all(rate == LR for rate in values[:80])
    assert values[80:] == pytest.approx([LR + (MIN - LR) * k / 20 for k in range(21)], rel=1e-12)


def test_step_drops_to_a_tenth_three_times():
    values = rates("step", min_lr=0.0)
    drops = [step for step in range(1, 101) if values[step] != values[step - 1]]
    assert drops == [30, 60, 90]
    assert [values[step] for step in (0, 30, 60, 90)] == pytest.approx([LR, LR / 10, LR / 100, LR / 1000], rel=1e-12)


def test_restarts_double_their_cycle():
    values = rates("restarts", total=701 + 1)  # 100, 200 and 400 steps, and the last one
    rises = [step for step in range(1, len(values)) if values[step] > values[step - 1]]
    assert rises == [101, 301]
    assert values[0] == LR
    assert values[101] == pytest.approx(LR, rel=1e-3)
    assert values[100] < 1.01 * MIN


@pytest.mark.parametrize("total", range(8, 400, 7))
def test_a_restart_on_the_border_of_two_steps_is_a_restart(total: int):
    """7 divides total - 1: cycles begin exactly at a step, whatever rounding says."""
    values, unit = rates("restarts", total), (total - 1) // 7
    assert values[unit] == values[3 * unit] == LR


@pytest.mark.parametrize("schedule", SHAPES)
def test_short_runs_and_steps_behind_the_end(schedule: str):
    assert rates(schedule, total=1) == [LR]
    assert rates(schedule, total=1, warmup=1) == [LR]
    assert rates(schedule, total=3, warmup=3) == pytest.approx([LR / 3, 2 * LR / 3, LR])
    behind = learning_rate(500, schedule=schedule, total_steps=101, lr=LR, min_lr=MIN, warmup_steps=0)
    assert behind == rates(schedule)[-1]


@pytest.mark.parametrize("schedule", SHAPES)
def test_a_function_of_the_step_alone(schedule: str):
    forwards = rates(schedule, warmup=7)
    backwards = [
        learning_rate(step, schedule=schedule, total_steps=101, lr=LR, min_lr=MIN, warmup_steps=7)
        for step in reversed(range(101))
    ]
    assert forwards == backwards[::-1]
