"""What a command is waiting for, said on stderr before it has been silent for more than a second.

    with busy("reading the data"): ...
On a terminal it is one line, which is updated and erased; else a line a second, and after two minutes one every ten. Nothing is
printed unless a command asked for it (`shown`): imported as a library, tapeless is silent.
Tested by: tests/test_progress.py."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

LOADING = "loading PyTorch"  # seconds, on a machine that has not loaded it for a while
SILENT = 0.6  # seconds without a word: less than the one second, since a busy machine wakes a thread late
TICK = 0.1
OFTEN, SELDOM = 120.0, 10.0  # of a long wait, how long there is a line a second, and how far apart they are then


class _Progress:
    def __init__(self) -> None:
        self.tasks: list[tuple[str, float]] = []  # what is being done, and since when; the last one is shown
        self.printing = False
        self._said, self._on_screen = 0.0, False
        self._lock = threading.Lock()

    def start(self, silent: float = 0.0) -> None:
        self.printing, self._said = True, time.monotonic() - silent
        with suppress(RuntimeError):  # no more threads (`ulimit -u`): silent
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while self.printing:
            time.sleep(TICK)
            with self._lock:
                self._tick()

    def _tick(self) -> None:
        last = self.tasks[-1:]  # a copy: another thread may end it now
        if not last or not self.printing:
            return
        now, since = time.monotonic(), last[0][1]
        terminal = sys.stderr.isatty()
        if now - self._said < (SILENT if terminal or now - since < OFTEN else SELDOM):
            return
        self._said, self._on_screen = now, terminal
        print(f"\r{text()}\x1b[K" if terminal else text(), end="" if terminal else "\n", file=sys.stderr, flush=True)

    def erase(self) -> None:
        with self._lock:
            if self._on_screen:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
                self._on_screen = False


_progress = _Progress()


def erase() -> None:
    """Take the line from the terminal, before another is printed."""
    _progress.erase()


def text() -> str:
    """What is being done, and for how long; empty if that is nothing."""
    last = _progress.tasks[-1:]
    if not last:
        return ""
    what, since = last[0]
    seconds = int(time.monotonic() - since)
    return f"{what} … {seconds} s" if seconds else f"{what} …"


@contextmanager
def busy(what: str, *, since: float | None = None) -> Iterator[None]:
    """Around what may take longer than a second and prints nothing. since: time.monotonic() of its begin, if not now."""
    _progress.tasks.append((what, since or time.monotonic()))
    try:
        yield
    finally:
        _progress.tasks.pop()
        erase()


@contextmanager
def shown(on: bool = True, *, silent: float = 0.0) -> Iterator[None]:
    """Inside, what is being done is printed; with False it is not, for whoever shows text() in another way. silent: seconds for
    which nothing has been printed."""
    before = _progress.printing
    if on and not before:
        _progress.start(silent)
    _progress.printing = on
    erase()
    try:
        yield
    finally:
        if before and not on:
            _progress.start()
        _progress.printing = before
