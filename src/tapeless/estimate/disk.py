"""The disk that a run's checkpoints take at most.

    at a time = the last k, the best, every n-th so far, and the one that is being written; never more than were ever saved
A checkpoint is saved every save_every steps, at the end, and at each new best: every evaluation counts as one.
Tested by: tests/estimate/test_disk.py."""

import math
from typing import NamedTuple

from tapeless.config import TrainConfig

PAPERS = 64 * 2**10  # bytes of names, shapes, state and manifest


class Disk(NamedTuple):
    checkpoint: int  # bytes of one
    saves: int | None  # how many are written in the run; None if the number of steps is not known
    at_once: int  # how many are there at the fullest moment

    @property
    def most(self) -> int:
        return self.checkpoint * self.at_once


def disk_of(tensors: int, train: TrainConfig, steps: int | None) -> Disk:
    """tensors: bytes of a checkpoint's. steps: of the run, None where they are not known yet."""
    size, kept = tensors + PAPERS, train.keep_last + 1
    if steps is None:
        return Disk(size, None, kept + 1)
    saves = count_saves(train, steps)
    kept += count_saves(train, steps, among=train.keep_every) if train.keep_every else 0
    return Disk(size, saves, min(saves, kept + 1))


def count_saves(train: TrainConfig, steps: int, among: int = 1) -> int:
    """How many steps are saved, of those that are a multiple of `among`. A run may have any number of steps, so they
    are counted without being listed."""

    def multiples(*intervals: int) -> int:
        return steps // math.lcm(among, *intervals)

    save, evaluation = train.save_every, train.eval_every
    found = multiples(save) + (multiples(evaluation) - multiples(save, evaluation) if evaluation else 0)
    last_alone = steps % save and (not evaluation or steps % evaluation)
    return found + bool(last_alone and steps % among == 0)


def times_due(every: int, steps: int) -> int:
    """How often something is done every so many steps and at the end; 0: only at the end."""
    return -(-steps // every) if every else 1
