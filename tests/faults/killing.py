"""Kills -9: at random moments, and at every point of a run at which it changes its folder. Run as a program of its own, since
it forks:    python tests/faults/killing.py random 5        python tests/faults/killing.py points 20"""

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))  # run_fixtures

from forked import KILLED, Child, killed_at_random
from small_run import new, outcome, restore_trainer
from watched_disk import Point, watched

from tapeless.training.run_dir import RunDir

LONGER = ["--max-steps", "60", "--save-every", "7", "--eval-every", "10", "--sample-every", "25", "--keep-last", "2"]
KINDS = {
    "float32": [],
    "bfloat16 and dropout": ["--dtype", "bfloat16", "--dropout", "0.1", "--grad-accum", "2"],
    "SGD": ["--optimizer", "sgd", "--lr", "0.1", "--seed", "3"],
    "epochs": ["--epochs", "2", "--batch-size", "4", "--max-steps", "1000"],
    "CPU kernels": ["--ops", "cpu"],
}
LINES = ("step", "eval", "sample", "checkpoint")


class Ended(NamedTuple):
    kind: str
    kills: int
    equal: bool


def random_kills(folder: Path, kills: int, seed: int) -> Iterator[Ended]:
    """Runs of every kind in turn, each killed and gone on with until it is through, and so many kills in all."""
    draw, left, number = random.Random(seed), kills, 0
    expected: dict[str, tuple[float, dict]] = {}
    while left > 0:
        kind = list(KINDS)[number % len(KINDS)]
        run, number = RunDir(folder / f"run-{number}"), number + 1
        if kind not in expected:
            expected[kind] = unbroken(RunDir(folder / f"unbroken-{len(expected)}"), kind)
        whole, end = expected[kind]
        status, killed = KILLED, 0
        while status == KILLED:
            status = killed_at_random(lambda run=run, kind=kind: start(run, kind), draw, whole if killed < left else 3600.0)
            killed += status == KILLED
        left -= killed
        yield Ended(kind, killed, status == 0 and outcome(run, LINES) == end)


def unbroken(run: RunDir, kind: str) -> tuple[float, dict]:
    """How long it takes, and what it comes to."""
    began = time.monotonic()
    if status := Child(lambda: start(run, kind), run.path.parent / "errors").wait():
        sys.exit(f"the unbroken run failed with exit status {status}: {(run.path.parent / 'errors').read_text()}")
    return time.monotonic() - began, outcome(run, LINES)


def start(run: RunDir, kind: str) -> int:
    return restore_trainer(run, *LONGER, *KINDS[kind]).status


class Killed(NamedTuple):
    moment: str
    problem: str


def kills_at_points(folder: Path, at_most: int) -> Iterator[Killed]:
    """Killed before every call of a run that changes its folder, which is after the one in front of it, and after the last;
    or at every so many of these moments. Then gone on with."""
    expected = RunDir(folder / "expected")
    listing = folder / "points"
    Child(lambda: traced(expected, listing)).wait()
    points = [Point(*fields) for fields in json.loads(listing.read_text())]
    end = outcome(expected, LINES)
    for number, point in enumerate([*points[:: max(1, len(points) // at_most)], None]):
        run = RunDir(folder / f"killed-{number}")
        status = Child(lambda run=run, point=point: die_at(run, point)).wait()
        problem = "" if status == (0 if point is None else KILLED) else f"exit status {status}, never came there"
        if not problem and (status := Child(lambda run=run: restore_trainer(run).status).wait()):
            problem = f"going on ended with {status}"
        if not problem and outcome(run, LINES) != end:
            problem = "another end"
        yield Killed("after the last call" if point is None else f"before {point}", problem)


def traced(run: RunDir, listing: Path) -> int:
    points: list[Point] = []
    with watched(run.path, points.append):
        status = new(run).status
    listing.write_text(json.dumps(points))
    return status


def die_at(run: RunDir, where: Point | None) -> int:
    def act(point: Point) -> None:
        if point == where:
            os.kill(os.getpid(), 9)

    with watched(run.path, act):
        return new(run).status


def main(what: str, count: int) -> int:
    with TemporaryDirectory(prefix="tapeless-") as scratch:
        if what == "random":
            ended = list(random_kills(Path(scratch), count, seed=time.time_ns()))
            print(f"{sum(one.kills for one in ended)} kills, {len(ended)} runs")
            problems = [f"{one.kind}: another end" for one in ended if not one.equal]
        else:
            killed = list(kills_at_points(Path(scratch), count))
            print(f"{len(killed)} kills at points")
            problems = [f"{one.moment}: {one.problem}" for one in killed if one.problem]
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
