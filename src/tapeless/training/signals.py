"""SIGTERM and SIGINT: the first requests a save and an end, the second ends the process at once.

The handler only sets a flag; the trainer polls it where it can stop. Tested by: tests/train/test_signals.py."""

import signal
from collections.abc import Sequence
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """`with StopSignals() as stop:` … `stop.requested()`. Only the main thread may enter it."""

    def __init__(self, signals: Sequence[int] = SIGNALS) -> None:
        self.signals = signals
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def requested(self) -> bool:
        return self.received is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        for each in self.signals:
            signal.signal(each, signal.SIG_DFL)  # a second signal has its usual effect

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.signal(number, self._handle) for number in self.signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
