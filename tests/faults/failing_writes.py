"""One call that changes a run's folder fails, once or from then on; and what must be so afterwards."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from small_run import Said, content, new, outcome, restore_trainer
from watched_disk import Point, in_writer_thread, watched

from tapeless.training.checkpoint import checkpoints, load_checkpoint
from tapeless.training.run_dir import RunDir


class Failure(NamedTuple):
    point: Point | None  # None where there was no such call
    writing: bool  # whether it was a call of the writer thread
    status: int
    problems: list[str]  # none, if all is well


def points_of(run: RunDir) -> list[Point]:
    """Every call of a whole run."""
    points: list[Point] = []
    with watched(run.path, points.append):
        said = new(run)
    assert said.status == 0, said.words
    return points


def fail_at(where: Point, errno: int, *, lasting: bool) -> tuple[Callable[[Point], None], list[tuple[Point, bool]]]:
    """Also what failed, and whether in the writer thread."""
    failed: list[tuple[Point, bool]] = []

    def act(point: Point) -> None:
        if point == where or (lasting and failed):
            failed.append((point, in_writer_thread()))
            raise OSError(errno, os.strerror(errno))

    return act, failed


def survive(run: RunDir, expected: RunDir, where: Point, errno: int, *, lasting: bool) -> Failure:
    """Run into the failure, look at what is left, go on when the disk is well again. expected: the same run without any
    failure, all its checkpoints kept."""
    act, failed = fail_at(where, errno, lasting=lasting)
    with watched(run.path, act):
        said = new(run)
    problems = spoken_problems(said, errno) + left_problems(run, expected)
    if said.status != 0:
        again = restore_trainer(run)
        problems += [f"going on failed: {again.words}"] if again.status else []
    if not problems and outcome(run) != outcome(expected):
        problems.append("the run did not come to the same end")
    return Failure(*(failed[0] if failed else (None, False)), said.status, problems)


def spoken_problems(said: Said, errno: int) -> list[str]:
    problems = [word for word in ("INTERNAL", "Traceback") if word in said.words]
    if said.status not in (0, 1, 2):
        problems.append(f"exit status {said.status}")
    if said.status and os.strerror(errno) not in said.words and "not enough space on the disk" not in said.words:
        problems.append(f"the reason is not told: {said.words}")
    return problems


def left_problems(run: RunDir, expected: RunDir) -> list[str]:
    """Every checkpoint that stands under its name is whole, and `latest` leads to one as soon as there is any."""
    good = content(expected)
    problems = [f"{name} is not what it should be" for name, files in content(run).items() if files != good[name]]
    if checkpoints(run.checkpoints):
        load_checkpoint(run.checkpoints, fallback=False, on_warning=lambda text: None)
    return problems


def unbroken(folder: Path) -> RunDir:
    run = RunDir(folder / "unbroken")
    said = new(run, "--keep-last", "99")
    assert said.status == 0, said.words
    return run
