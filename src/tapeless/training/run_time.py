"""Where the time of a run went, folded from the events of metrics.jsonl: for `tapeless bench --run` and the report.

    times = RunTime()
    times.add(event)             every event, in order, of any number of processes (resumes)
    times.found()                seconds of the start by phase, then of the training loop by activity, as plain data
The first steps of a process compile and capture; they count as a phase of its start. The events `time_spent` count from the
beginning of a process, so that of one that was killed the last such event counts, and the steps up to it.
Tested by: tests/train/test_run_time.py."""

from collections.abc import Mapping
from statistics import median
from typing import Any

FIRST_STEPS = 2  # the first compiles, the second is captured
MOST = 4096  # step times to keep, evenly spaced: enough for a median of any run


class RunTime:
    def __init__(self) -> None:
        self._startup: dict[str, float] = {}
        self._seconds: dict[str, float] = {}  # of the processes before this one
        self._steps = self._processes = 0  # steps of the processes before this one
        self._first, self._warm_up, self._warm_up_steps = 0, 0.0, 0  # of this process; _first: the step it began at
        self._spent: Mapping[str, float] = {}
        self._spent_step = 0
        self._times: list[float] = []
        self._stride, self._seen = 1, 0
        self._tokens_per_step = 0.0

    def add(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind in ("start", "resume"):
            self._end_process()
            self._processes += 1
            self._first = self._spent_step = event["step"]
            for phase, seconds in event.get("startup_seconds", {}).items():
                self._startup[phase] = self._startup.get(phase, 0.0) + seconds
        elif kind == "step":
            self._tokens_per_step = event["tokens"] / event["step"]
            if event["step"] - self._first <= FIRST_STEPS:
                self._warm_up += event["step_seconds"]
                self._warm_up_steps += 1
            else:
                self._keep(event["step_seconds"])
        elif kind == "time_spent":
            self._spent, self._spent_step = event["seconds"], event["step"]

    def _keep(self, seconds: float) -> None:
        if self._seen % self._stride == 0:
            self._times.append(seconds)
        self._seen += 1
        if len(self._times) == MOST:
            self._times, self._stride = self._times[::2], 2 * self._stride

    def _of_process(self) -> tuple[dict[str, float], int]:
        """Seconds by activity, and steps, without the first ones."""
        steps = self._spent_step - self._first - self._warm_up_steps
        if not self._spent or steps <= 0:
            return {}, 0
        return {**self._spent, "step": self._spent.get("step", 0.0) - self._warm_up}, steps

    def _totals(self) -> tuple[dict[str, float], int]:
        now, steps = self._of_process()
        names = dict.fromkeys([*self._seconds, *now])
        return {name: self._seconds.get(name, 0.0) + now.get(name, 0.0) for name in names}, self._steps + steps

    def _first_steps(self) -> float:
        return self._startup.get("first steps", 0.0) + self._warm_up

    def _end_process(self) -> None:
        self._seconds, self._steps = self._totals()
        if self._warm_up_steps:
            self._startup["first steps"] = self._first_steps()
        self._spent, self._warm_up, self._warm_up_steps = {}, 0.0, 0

    def found(self) -> dict[str, Any] | None:
        """None if there is nothing to tell: of a run without these events, or with too few steps."""
        seconds, steps = self._totals()
        if not steps or not self._times:
            return None
        step, wall = median(self._times), sum(seconds.values()) / steps
        return {
            "processes": self._processes,
            "startup_seconds": {**self._startup, "first steps": self._first_steps()},
            "steps": steps,
            "seconds": dict(sorted(seconds.items(), key=lambda item: -item[1])),
            "median_step_s": step,
            "wall_per_step_s": wall,
            "ratio": wall / step,
            "tokens_per_s": self._tokens_per_step / wall,
            "step_tokens_per_s": self._tokens_per_step / step,
        }


Cells = tuple[str, ...]


def startup_rows(found: Mapping[str, Any]) -> list[Cells]:
    """A header, the phases, and their sum."""
    startup = found["startup_seconds"]
    title = "start-up" if found["processes"] == 1 else f"start-up, {found['processes']} processes"
    phases = [*startup.items(), ("in all", sum(startup.values()))]
    return [(title, "seconds"), *((phase, f"{seconds:.2f}") for phase, seconds in phases)]


def activity_rows(found: Mapping[str, Any]) -> list[Cells]:
    """A header, the activities by their seconds, and their sum."""
    total = sum(found["seconds"].values())
    rows = [
        (name, f"{seconds:.2f}", f"{seconds / total:.1%}", f"{1e3 * seconds / found['steps']:.3f}")
        for name, seconds in (*found["seconds"].items(), ("in all", total))
    ]
    return [(f"{found['steps']:,} steps", "seconds", "share", "ms per step"), *rows]


def verdict(found: Mapping[str, Any]) -> str:
    speeds = f"{found['tokens_per_s']:,.0f} tokens/s; the step alone {found['step_tokens_per_s']:,.0f}"
    step, wall = (f"{1e3 * found[key]:.3f} ms" for key in ("median_step_s", "wall_per_step_s"))
    return f"wall clock per step {wall}, {found['ratio']:.3f} of the median step, {step}; {speeds}"
