"""What does not fit into memory together runs in groups, ours in each of them."""

from dataclasses import replace

import pytest
from bench_fixtures import task

from tapeless.bench.groups import estimated_bytes, groups
from tapeless.bench.measure import How
from tapeless.bench.task import USUAL
from tapeless.config import load_preset

ALL = How().tasks(task(), USUAL["cpu"])


def labels(found: list) -> list[list[str]]:
    return [[each.label for each in group] for group in found]


def test_all_together_where_there_is_room():
    (group,) = groups(ALL, 100, size=lambda each: 1)
    assert sorted(each.label for each in group) == sorted(each.label for each in ALL)


def test_ours_is_in_every_group_and_nobody_twice():
    found = labels(groups(ALL, 5, size=lambda each: 1))  # 4.5: ours twice, and two more
    assert all(group[:2] == ["ours float32", "ours bfloat16"] for group in found)
    others = [label for group in found for label in group[2:]]
    assert sorted(others) == sorted(each.label for each in ALL if each.contender != "ours")
    assert all(len(group) <= 4 for group in found)
    assert len(found) == 4


def test_one_contender_at_a_time_is_the_least():
    found = labels(groups(ALL, 0, size=lambda each: 1))
    assert [len(group) for group in found] == [3] * 8


def test_ours_alone_is_a_group():
    alone = How(("float32",)).tasks(task(), ["ours"])
    assert labels(groups(alone, 0)) == [["ours float32"]]


@pytest.mark.parametrize(("name", "batch_size", "ours", "peers"), [("llama-small", 4, 1.0, 1.9), ("llama-base", 1, 3.3, 4.4)])
def test_estimates_are_above_what_was_measured_and_not_by_much(name: str, batch_size: int, ours: float, peers: float):
    """In gigabytes, of whole processes."""
    model = load_preset(name)
    train = replace(task().train, batch_size=batch_size, seq_len=model.max_seq_len)
    large = replace(task(), model=model, train=train)
    for dtype in ("float32", "bfloat16"):
        assert ours < estimated_bytes(large.by("ours", dtype)) / 1e9 < 1.4 * ours
        assert peers < estimated_bytes(large.by("compile", dtype)) / 1e9 < 1.4 * peers
