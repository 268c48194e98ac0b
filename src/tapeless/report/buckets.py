"""A long series in a short one: mean, least and greatest of every value over stretches of steps.

The stretches are 1, 2, 4 … steps long, doubled whenever there would be more than so many of them: a value costs the same at
step 100,000 as at step 1, nothing grows with the run, and what a resume reads again makes the very same stretches.
Tested by: tests/report/test_buckets.py."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

MOST = 512  # stretches: more than a chart on a screen has room for


class Cell:
    """One stretch."""

    def __init__(self) -> None:
        self.step = 0  # the last one in it
        self.values: dict[str, list[float]] = {}  # name -> how many, sum, least, greatest; of the finite ones

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self.step = step
        for name, value in values.items():
            if not math.isfinite(value):
                continue
            known = self.values.get(name)
            if known is None:
                self.values[name] = [1, value, value, value]
            else:
                known[0] += 1
                known[1] += value
                known[2] = min(known[2], value)
                known[3] = max(known[3], value)

    def join(self, later: "Cell") -> None:
        self.step = later.step
        for name, (n, total, least, greatest) in later.values.items():
            mine = self.values.get(name, [0, 0.0, math.inf, -math.inf])
            self.values[name] = [mine[0] + n, mine[1] + total, min(mine[2], least), max(mine[3], greatest)]


class Buckets:
    def __init__(self, most: int = MOST):
        self.most, self.width = most, 1
        self.cells: dict[int, Cell] = {}  # number of the stretch -> what is in it, in order

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """step: counted from 1, never falling."""
        at = (step - 1) // self.width
        if at not in self.cells:
            if len(self.cells) == self.most:
                self._double()
                at = (step - 1) // self.width
            self.cells.setdefault(at, Cell())
        self.cells[at].add(step, values)

    def _double(self) -> None:
        """Until there is room: points that lie far apart may share no stretch at first."""
        while len(self.cells) >= self.most:
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
        """One a stretch; None where it has no finite value."""
        return [rounded(known[1] / known[0]) if (known := cell.values.get(name)) else None for cell in self.cells.values()]

    def sums(self, name: str) -> list[float]:
        return [cell.values[name][1] if name in cell.values else 0.0 for cell in self.cells.values()]

    def last(self, name: str) -> list[float | None]:
        """Of values that only grow: the greatest is the last."""
        return self._at(name, 3, digits=9)

    def ranges(self, name: str) -> dict[str, list[float | None]]:
        """Mean, least and greatest; the mean alone where every stretch is a single step."""
        means = {"mean": self.means(name)}
        return means if self.width == 1 else means | {"least": self._at(name, 2), "greatest": self._at(name, 3)}

    def _at(self, name: str, which: int, digits: int = 5) -> list[float | None]:
        values: Sequence[Any] = [cell.values.get(name) for cell in self.cells.values()]
        return [None if known is None else rounded(known[which], digits) for known in values]


def rounded(value: float, digits: int = 5) -> float:
    """Fewer digits, fewer bytes: a chart has some hundred pixels."""
    return float(f"{value:.{digits}g}")
