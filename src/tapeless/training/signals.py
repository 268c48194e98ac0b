"""SIGTERM, SIGINT and SIGHUP: the first asks for an end, the second ends the process at once.

Around a whole command the first signal raises Interrupted, wherever the command is: reading a pipe, importing, checking
gradients. Around the steps of a run it only sets a flag, which the trainer polls where it can stop. Whoever sent the signal
reads on stderr that it has arrived: Python's handlers run between two of its instructions, and a matmul or a compiler may take
seconds, so a thread that the operating system's handler wakes says it (`acknowledging`).

A closing terminal sends SIGHUP twice, by the kernel and by the shell: a second one within a second is the same.
An ignored SIGHUP (nohup) stays ignored.
Tested by: tests/train/test_signals.py."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

SIGHUP = getattr(signal, "SIGHUP", None)  # Windows has none
SIGNALS = (signal.SIGTERM, signal.SIGINT, *([SIGHUP] if SIGHUP is not None else []))
TOGETHER = 1.0  # seconds
STOPPING = "stopping after this step and a checkpoint"
_active: list["StopSignals"] = []  # the last one handles signals


class Interrupted(BaseException):
    """Not a KeyboardInterrupt: Python ends a process by SIGINT, whatever status it asks for, if that was ever raised inside of
    `exec` of a text, which imports use."""


class StopSignals:
    """`with StopSignals() as stop:` … `stop.requested()`. Only the main thread may enter it."""

    def __init__(self, signals: Sequence[int] = SIGNALS, *, raises: bool = False, says: str | None = STOPPING) -> None:
        """raises: Interrupted at the first signal. says: what is printed then."""
        self.signals, self.raises, self.says = signals, raises, says
        self.received: int | None = None
        self._at = 0.0
        self._unsaid = threading.Lock()  # taken by whoever says it
        self._before: dict[int, Any] = {}

    @staticmethod
    def interrupts() -> bool:
        """Whether a signal now would raise Interrupted."""
        return bool(_active) and _active[-1].raises

    def requested(self) -> bool:
        return self.received is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._at = number, time.monotonic()
            for each in self._before:
                if each != SIGHUP or number != SIGHUP:
                    signal.signal(each, signal.SIG_DFL)  # a second signal has its usual effect
            self.acknowledge(number)
            if self.raises:
                raise Interrupted
        elif time.monotonic() - self._at > TOGETHER:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def acknowledge(self, number: int) -> None:
        """Once, and by the operating system's own call: the main thread may be inside of a print."""
        if self.says is not None and self._unsaid.acquire(blocking=False):
            line = f"{signal.Signals(number).name} received: {self.says}; a second signal ends this at once\n"
            with contextlib.suppress(OSError):
                os.write(2, (b"\r\x1b[K" if os.isatty(2) else b"") + line.encode())

    def __enter__(self) -> "StopSignals":
        if self.interrupts() and _active[-1].requested():
            raise Interrupted  # which an import has swallowed
        for number in self.signals:
            before = signal.getsignal(number)
            if number != SIGHUP or before is not signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._handle)
        _active.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _active.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def acknowledging() -> Iterator[None]:
    """Signals are acknowledged at once, whatever the main thread does. For a process that runs one command."""
    if os.name != "posix":
        yield
        return
    readable, writable = os.pipe()
    os.set_blocking(writable, False)

    def listen() -> None:
        while numbers := os.read(readable, 16):
            for number in numbers:
                if _active and number in _active[-1].signals:
                    _active[-1].acknowledge(number)

    with contextlib.suppress(RuntimeError):  # no more threads (`ulimit -u`): the handler says it, a little later
        threading.Thread(target=listen, daemon=True).start()
    before = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writable)
