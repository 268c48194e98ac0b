"""Contenders measured side by side: all are alive, and each has its turn in every round, so that noise hits all alike.

    build, first step                            one contender after the other
    warm-up                                      not counted; how long its steps take decides how many a turn has
    rounds x (ours, eager, compile, …)           every second round backwards; a turn lasts about a second
Where a turn has several steps, its first is not counted: the caches were another contender's until then.
Tested by: tests/bench/test_side_by_side.py."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from tapeless.bench.task import Task
from tapeless.errors import WorkerError

TURN = 1.0  # seconds
MOST = 500  # steps in a turn
WARM_UP = 0.25  # of a turn, at least three steps; a single one where it takes much longer than a turn


class Handle(Protocol):
    """A worker, as process.Process is one."""

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]: ...

    def since_start(self) -> float: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> Any: ...


Start = Callable[[Task], Handle]
Progress = Callable[[str], None]


@dataclass
class Measured:
    task: Task
    group: int  # contenders of one group were alive together
    result: Any = None  # of the first unit of work: the loss, or the tokens
    first_step_s: float = 0.0  # from the start of the process
    rounds: list[list[float]] = field(default_factory=list)  # seconds of each unit of work
    others: list[float] = field(default_factory=list)  # of each turn: the share of all cores that other processes had
    before: int = 0  # bytes, with the libraries and without the model
    peak: int = 0  # bytes, while the steps were timed
    reserved: int | None = None  # bytes, on a GPU: the peak with what the allocator held around it
    parts: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Comparison:
    measured: list[Measured] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # label -> why


def begin(worker: Handle, measured: Measured) -> None:
    """Build the model and take its first step, which is when libraries compile."""
    measured.before = worker.ask("build", task=measured.task.as_json())["before"]
    measured.result = worker.ask("first")["result"]
    measured.first_step_s = worker.since_start()


def steps_in_a_turn(worker: Handle, turn: float) -> int:
    """By a warm-up that is not counted."""
    seconds = worker.ask("steps", count=1)["seconds"]
    if seconds[0] < 3 * turn:
        count = max(2, min(MOST, round(WARM_UP * turn / seconds[0])))
        seconds = worker.ask("steps", count=count)["seconds"]
    return max(1, min(MOST, round(turn / median(seconds))))


def side_by_side(
    groups: Sequence[Sequence[Task]], start: Start, *, rounds: int, turn: float = TURN, progress: Progress = lambda text: None
) -> Comparison:
    found = Comparison()
    for number, tasks in enumerate(groups):
        with ExitStack() as stack:
            alive: list[tuple[Handle, Measured, int]] = []
            for task in tasks:
                measured = Measured(task, number)
                try:
                    worker = stack.enter_context(start(task))
                    begin(worker, measured)
                    count = steps_in_a_turn(worker, turn)
                    worker.ask("reset")
                except WorkerError as error:
                    found.left_out[task.label] = str(error)
                    progress(f"left out: {error}")
                    continue
                alive.append((worker, measured, count))
                progress(f"{task.label}: first step after {measured.first_step_s:.1f} s, {count} steps a turn")
            for index in range(rounds):
                for worker, measured, count in alive[:: -1 if index % 2 else 1]:
                    answer = worker.ask("steps", count=count + (count > 1))
                    measured.rounds.append(answer["seconds"][count > 1 :])
                    measured.others.append(answer["others"])
                progress(
                    f"round {index + 1} of {rounds}" + (f", group {number + 1} of {len(groups)}" if len(groups) > 1 else "")
                )
            for worker, measured, _ in alive:
                end = worker.ask("finish")
                measured.peak, measured.reserved = end["peak"], end["reserved"]
                measured.parts, measured.facts = end["parts"], end["facts"]
                found.measured.append(measured)
    return found
