"""Where the time of a training loop goes: seconds by activity, without gaps.

    spent = TimeSpent()
    with spent("evaluation"): …      nested activities count for the inner one; what is in none counts as "other"
Tested by: tests/train/test_time_spent.py."""

import time
from types import TracebackType

OTHER = "other"


class TimeSpent:
    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._stack = [OTHER]
        self._since = time.perf_counter()
        self._activities: dict[str, _Activity] = {}

    def __call__(self, activity: str) -> "_Activity":
        if activity not in self._activities:
            self._activities[activity] = _Activity(self, activity)
        return self._activities[activity]

    def begin(self, activity: str) -> None:
        self._charge()
        self._stack.append(activity)

    def end(self) -> None:
        self._charge()
        self._stack.pop()

    def seconds(self) -> dict[str, float]:
        """By activity, up to now."""
        self._charge()
        return dict(self._seconds)

    def restart(self) -> None:
        """Count from now."""
        self._seconds.clear()
        self._since = time.perf_counter()

    def _charge(self) -> None:
        now = time.perf_counter()
        activity = self._stack[-1]
        self._seconds[activity] = self._seconds.get(activity, 0.0) + now - self._since
        self._since = now


class _Activity:
    def __init__(self, spent: TimeSpent, name: str):
        self.spent, self.name = spent, name

    def __enter__(self) -> None:
        self.spent.begin(self.name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.spent.end()
