"""Downsampling of a series while it grows: mean, minimum and maximum of every value over spans of steps.

The spans are 1, 2, 4 … steps long, doubled whenever there would be more than a fixed number of them: adding a value costs the
same at step 100,000 as at step 1, the size is bounded, and reading the same events again gives the same spans.
Tested by: tests/report/test_buckets.py."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

MAX_POINTS = 512  # more than a chart on a screen has pixels for


class Cell:
    """One span."""

    def __init__(self) -> None:
        self.step = 0  # the last one in the span
        self.values: dict[
            str, tuple[float, float, float, float]
        ] = {}  # name -> count, sum, minimum, maximum of the finite ones

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self.step = step
        for name, value in values.items():
            if math.isfinite(value):
                self._merge(name, 1, value, value, value)

    def join(self, later: "Cell") -> None:
        self.step = later.step
        for name, known in later.values.items():
            self._merge(name, *known)

    def _merge(self, name: str, n: float, total: float, low: float, high: float) -> None:
        known = self.values.get(name, (0, 0.0, math.inf, -math.inf))
        self.values[name] = (known[0] + n, known[1] + total, min(known[2], low), max(known[3], high))


class Buckets:
    def __init__(self, max_points: int = MAX_POINTS):
        self.max_points, self.width = max_points, 1
        self.cells: dict[int, Cell] = {}  # index of the span -> its values, in order

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """step: from 1, non-decreasing."""
        at = (step - 1) // self.width
        if at not in self.cells:
            if len(self.cells) == self.max_points:
                self._double()
                at = (step - 1) // self.width
            self.cells.setdefault(at, Cell())
        self.cells[at].add(step, values)

    def _double(self) -> None:
        """Until there is room: distant points may not share a span at first."""
        while len(self.cells) >= self.max_points:
            self.width *= 2
            joined: dict[int, Cell] = {}
            for at, cell in self.cells.items():
                if at // 2 in joined:
                    joined[at // 2].join(cell)
                else:
                    joined[at // 2] = cell
            self.cells = joined

    def steps(self) -> list[int]:
        return [cell.step for cell in self.cells.values()]

    def means(self, name: str) -> list[float | None]:
        """One per span; None if it has no finite value."""
        return [rounded(known[1] / known[0]) if (known := cell.values.get(name)) else None for cell in self.cells.values()]

    def sums(self, name: str) -> list[float]:
        return [cell.values[name][1] if name in cell.values else 0.0 for cell in self.cells.values()]

    def last(self, name: str) -> list[float | None]:
        """Of values that only grow: the maximum is the last."""
        return self._at(name, 3, digits=9)

    def ranges(self, name: str) -> dict[str, list[float | None]]:
        """Mean, minimum and maximum; the mean alone if every span is a single step."""
        means = {"mean": self.means(name)}
        return means if self.width == 1 else means | {"min": self._at(name, 2), "max": self._at(name, 3)}

    def _at(self, name: str, which: int, digits: int = 5) -> list[float | None]:
        values: Sequence[Any] = [cell.values.get(name) for cell in self.cells.values()]
        return [None if known is None else rounded(known[which], digits) for known in values]


def rounded(value: float, digits: int = 5) -> float:
    """Fewer digits, fewer bytes: a chart has a few hundred pixels."""
    return float(f"{value:.{digits}g}")
