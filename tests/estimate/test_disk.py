"""How many checkpoints are there at a time, against a count by hand and against a run."""

import pytest

from tapeless.config import TrainConfig
from tapeless.estimate.disk import PAPERS, count_saves, disk_of, times_due


@pytest.mark.parametrize(
    ("changes", "steps", "saves", "at_once"),
    [
        ({"save_every": 10, "eval_every": 0}, 100, 10, 4),  # the last two, the best, and one being written
        ({"save_every": 10, "eval_every": 0, "keep_last": 5}, 100, 10, 7),
        ({"save_every": 10, "eval_every": 0}, 20, 2, 2),  # no more than were ever saved
        ({"save_every": 200, "eval_every": 0}, 100, 1, 1),  # at the end
        ({"save_every": 10, "eval_every": 0, "keep_every": 50}, 100, 10, 6),
        ({"save_every": 50, "eval_every": 20}, 100, 6, 4),  # 20 40 50 60 80 100: each evaluation may be the best
    ],
)
def test_by_hand(changes: dict, steps: int, saves: int, at_once: int):
    found = disk_of(1000, TrainConfig(**changes), steps)
    assert (found.saves, found.at_once) == (saves, at_once)
    assert found.most == at_once * (1000 + PAPERS)


def test_without_a_number_of_steps_it_is_what_stays():
    assert disk_of(1000, TrainConfig(keep_last=3), None).at_once == 5


@pytest.mark.parametrize("steps", [1, 6, 7, 20, 35, 70, 73])
@pytest.mark.parametrize(("save", "evaluation"), [(7, 0), (7, 5), (6, 4), (10, 10), (100, 3)])
def test_counts_are_those_of_a_list(save: int, evaluation: int, steps: int):
    train = TrainConfig(save_every=save, eval_every=evaluation)
    every = [interval for interval in (save, evaluation) if interval]
    listed = [step for step in range(1, steps + 1) if step == steps or any(step % interval == 0 for interval in every)]
    for among in (1, 2, 7):
        assert count_saves(train, steps, among) == sum(step % among == 0 for step in listed)
    due = [step for step in range(1, steps + 1) if step == steps or (evaluation and step % evaluation == 0)]
    assert times_due(evaluation, steps) == len(due)


def test_any_number_of_steps():
    assert disk_of(1000, TrainConfig(save_every=1, keep_last=10**12), 10**12).at_once == 10**12
