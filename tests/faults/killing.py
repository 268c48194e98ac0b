"""Kills -9: at random moments, and at every point of a run at which it changes its folder. Run as a program of its own, since
it forks:    python tests/faults/killing.py random 5        python tests/faults/killing.py points 20
Checkpoints are written in a thread of their own. Which thread a kill found at work is known: by marks in memory that outlives
the process, or because the writer thread itself kills."""

import json
import mmap
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))  # run_fixtures

from forked import KILLED, Child, killed_at_random
from small_run import new, outcome, restore_trainer
from watched_disk import Point, in_writer_thread, watched

from tapeless.training.checkpoint_writer import CheckpointWriter
from tapeless.training.run_dir import RunDir

LONGER = ["--max-steps", "60", "--save-every", "3", "--eval-every", "10", "--sample-every", "25", "--keep-last", "2"]
KINDS = {
    "float32": [],
    "bfloat16 and dropout": ["--dtype", "bfloat16", "--dropout", "0.1", "--grad-accum", "2"],
    "SGD": ["--optimizer", "sgd", "--lr", "0.1", "--seed", "3"],
    "epochs": ["--epochs", "2", "--batch-size", "4", "--max-steps", "1000"],
    "CPU kernels": ["--ops", "cpu"],
    "a checkpoint at each step": ["--save-every", "1", "--ema-decay", "0.9"],
    "large checkpoints": ["--save-every", "2", "--hidden-dim", "128", "--intermediate-dim", "384", "--num-layers", "2"],
}
LINES = ("step", "eval", "sample", "checkpoint")


MARKS = mmap.mmap(-1, 2)  # shared with forked processes
BESIDE = 0.01  # seconds that training runs on before the writer thread kills: a few steps
WRITING, WAITING = 0, 1  # 1 while the writer thread writes a checkpoint; while the training thread waits for it


class Ended(NamedTuple):
    kind: str
    kills: int
    writing: int  # kills while the writer thread was writing
    training: int  # of these, while the training thread did not wait for it
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
        status, killed, writing, training = KILLED, 0, 0, 0
        while status == KILLED:
            MARKS[:] = bytes(2)
            work = partial(marked, partial(start, run, kind))
            status = killed_at_random(work, draw, whole if killed < left else 3600.0)
            killed += status == KILLED
            writing += status == KILLED and MARKS[WRITING]
            training += status == KILLED and MARKS[WRITING] and not MARKS[WAITING]
        left -= killed
        yield Ended(kind, killed, writing, training, status == 0 and outcome(run, LINES) == end)


def unbroken(run: RunDir, kind: str) -> tuple[float, dict]:
    """How long it takes, and what it comes to."""
    seconds = 0.0
    for again in (RunDir(run.path.with_name("warm")), run):  # the first may compile
        began = time.monotonic()
        if status := Child(lambda again=again: start(again, kind), run.path.parent / "errors").wait():
            sys.exit(f"the unbroken run failed with exit status {status}: {(run.path.parent / 'errors').read_text()}")
        seconds = time.monotonic() - began
    shutil.rmtree(run.path.with_name("warm"))
    return seconds, outcome(run, LINES)


def start(run: RunDir, kind: str) -> int:
    return restore_trainer(run, *LONGER, *KINDS[kind]).status


def marked(work: Callable[[], int]) -> int:
    """The same in a forked process, which leaves behind what its threads were doing."""
    mark("_write", WRITING)
    mark("wait", WAITING)
    return work()


def mark(name: str, number: int) -> None:
    function: Callable[..., Any] = getattr(CheckpointWriter, name)

    def marked(*args: Any, **options: Any) -> Any:
        MARKS[number] = 1
        try:
            return function(*args, **options)
        finally:
            MARKS[number] = 0

    setattr(CheckpointWriter, name, marked)


class Killed(NamedTuple):
    moment: str
    writing: bool  # whether it was a call of the writer thread
    training: bool  # if so, whether the training thread did not wait for it
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
        MARKS[:] = bytes(2)
        status = Child(lambda run=run, point=point: die_at(run, point)).wait()
        writing = bool(MARKS[WRITING])
        training = writing and not MARKS[WAITING]
        problem = "" if status == (0 if point is None else KILLED) else f"exit status {status}, never came there"
        if not problem and (status := Child(lambda run=run: restore_trainer(run).status).wait()):
            problem = f"going on ended with {status}"
        if not problem and outcome(run, LINES) != end:
            problem = "another end"
        yield Killed("after the last call" if point is None else f"before {point}", writing, training, problem)


def traced(run: RunDir, listing: Path) -> int:
    points: list[Point] = []
    with watched(run.path, points.append):
        status = new(run).status
    listing.write_text(json.dumps(points))
    return status


def die_at(run: RunDir, where: Point | None) -> int:
    def act(point: Point) -> None:
        if point == where:
            if in_writer_thread():
                MARKS[WRITING] = 1
                time.sleep(BESIDE)
            os.kill(os.getpid(), 9)

    mark("wait", WAITING)
    with watched(run.path, act):
        return new(run).status


def main(what: str, count: int) -> int:
    with TemporaryDirectory(prefix="tapeless-") as scratch:
        if what == "random":
            ended = list(random_kills(Path(scratch), count, seed=time.time_ns()))
            inside = sum(one.writing for one in ended)
            print(f"{sum(one.kills for one in ended)} kills, {inside} of them in the writer thread, {len(ended)} runs")
            problems = [f"{one.kind}: another end" for one in ended if not one.equal]
        else:
            killed = list(kills_at_points(Path(scratch), count))
            print(f"{len(killed)} kills at points, {sum(one.writing for one in killed)} of them in the writer thread")
            problems = [f"{one.moment}: {one.problem}" for one in killed if one.problem]
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
