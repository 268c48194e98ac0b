"""Long series shortened: nothing lost that a chart would show, nothing that grows."""

import math
import random

import pytest

from tapeless.report.buckets import Buckets


def test_few_points_stay_as_they_are():
    buckets = Buckets(8)
    for step in range(1, 9):
        buckets.add(step, {"loss": 1 / step})
    assert buckets.width == 1
    assert buckets.steps() == [*range(1, 9)]
    assert buckets.ranges("loss") == {"mean": [float(f"{1 / step:.5g}") for step in range(1, 9)]}


@pytest.mark.parametrize("steps", [9, 16, 17, 1000, 4097])
def test_spans_hold_their_steps(steps: int):
    draw = random.Random(steps)
    values = [draw.uniform(-1, 1) for _ in range(steps)]
    buckets = Buckets(8)
    for step, value in enumerate(values, 1):
        buckets.add(step, {"x": value, "n": 1})
    width = buckets.width
    parts = [values[i : i + width] for i in range(0, steps, width)]
    assert 4 <= len(buckets.cells) <= 8
    assert len(buckets.cells) == len(parts)
    found = buckets.ranges("x")
    assert found["mean"] == pytest.approx([sum(part) / len(part) for part in parts], rel=1e-4)
    assert found["min"] == pytest.approx([min(part) for part in parts], rel=1e-4)
    assert found["max"] == pytest.approx([max(part) for part in parts], rel=1e-4)
    assert buckets.sums("n") == [len(part) for part in parts]
    assert buckets.steps()[-1] == steps
    assert buckets.last("n")[-1] == 1


def test_a_spike_is_never_averaged_away():
    buckets = Buckets(16)
    for step in range(1, 10_001):
        buckets.add(step, {"x": 100.0 if step == 4567 else 1.0})
    assert max(value for value in buckets.ranges("x")["max"] if value is not None) == 100


def test_what_is_no_number_leaves_a_gap():
    buckets = Buckets(4)
    for step, value in enumerate([1.0, math.nan, math.inf, 4.0], 1):
        buckets.add(step, {"x": value})
    assert buckets.means("x") == [1.0, None, None, 4.0]
    buckets.add(5, {"y": 1.0})
    assert buckets.means("x") == [1.0, 4.0, None]  # 1 and the NaN, the infinity and 4, nothing


def test_points_far_apart_find_room():
    buckets = Buckets(4)
    for step in (1, 2, 4, 1000, 2000, 100_000):
        buckets.add(step, {"x": step})
    assert len(buckets.cells) <= 4
    assert buckets.steps()[-1] == 100_000
