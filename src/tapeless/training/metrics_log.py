"""metrics.jsonl: one event a line, each step exactly once, also after a kill and a resume.

Lines are written several at a time (Recorder in runs.py): a killed process loses the last ones, and an incomplete one, which a
resume writes again. sync() before a checkpoint, in the thread that writes it, makes sure that the events up to it are on disk.
Lines that cannot be written stay in memory and are tried again with the next: a full disk neither ends the training nor leaves
a gap in the log. JSON has no NaN and no infinity: they are the strings "NaN", "Infinity" and "-Infinity", which float() reads.
Tested by: tests/train/test_metrics_log.py."""

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from threading import Lock
from typing import IO, Any

from tapeless.data.files import atomic_write, json_bytes, reason, unused, writing
from tapeless.errors import DataError, TapelessError
from tapeless.regular import regular

NEWLINE = b"\n"
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
log = logging.getLogger("tapeless")


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The events in order. The last line of a live or killed run may be incomplete and is then left out."""
    with open(regular(path), "rb") as file:
        lines = file.read().split(NEWLINE)
    if lines[-1] == b"":
        lines.pop()
    for number, line in enumerate(lines, 1):
        event = _event(line)
        if event is not None:
            yield event
        elif number < len(lines):
            raise DataError(f"{path}:{number}: expected a line of JSON, got {line[:40]!r}")


@contextmanager
def as_written(path: object) -> Iterator[None]:
    """Around code that reads fields of events: a missing or mistyped field means that the file is damaged."""
    try:
        yield
    except TapelessError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(f"{path}: damaged: an event has a missing or mistyped field: {error!r}") from error


def _event(line: bytes) -> dict[str, Any] | None:
    """The event of a line; None if it is not a valid one."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(event, dict) and isinstance(event.get("event"), str) and isinstance(event.get("step", 0), int)
    return event if whole else None


class MetricsLog:
    """Appends events."""

    def __init__(self, path: Path, *, on_warning: Callable[[str], None] = log.warning):
        self.path, self.on_warning = path, on_warning
        self._events: list[Mapping[str, Any]] = []  # that are not lines yet: encoding many at once takes less time
        self._pending = bytearray()  # lines that are not written yet
        self._writing = Lock()
        self._failing = False
        self._later: list[str] = []  # warnings of another thread, emitted with the next flush
        self._sync_failing = False
        self._file = self._open()

    def _open(self) -> IO[bytes]:
        with writing(self.path):
            return open(self.path, "a+b", buffering=0)  # for the life of the run

    def append(self, event: Mapping[str, Any]) -> None:
        """Kept in memory, as it is then, until flush() or sync()."""
        with self._writing:
            self._events.append(event)

    def flush(self) -> None:
        """Give the lines to the operating system. Warns once about a failure, until a write succeeds."""
        why = ""
        try:
            self._write_lines()
        except OSError as error:
            why = reason(error)  # said below: the error refers to the buffer, which cannot grow as long as that exists
        before, self._failing = self._failing, bool(why)
        if why and not before:  # the warning is an event, with which the lines are tried again
            self.on_warning(f"{self.path} cannot be written: {why}; its lines are buffered, training continues")
        while self._later:
            self.on_warning(self._later.pop(0))

    def sync(self) -> None:
        """Called before a checkpoint, from any thread. A failure is only a warning, with the next flush: the checkpoint matters
        more."""
        with suppress(OSError):  # flush() tries again, and warns
            self._write_lines()
            self._restore()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            if not self._sync_failing:
                self._sync_failing = True
                self.warn_later(f"{self.path} cannot be synced to the disk: {reason(error)}; training continues")
        else:
            self._sync_failing = False

    def _write_lines(self) -> None:
        with self._writing:
            events, self._events = self._events, []
            self._pending += b"".join(map(event_line, events))
            while self._pending:
                del self._pending[: self._file.write(self._pending)]

    def warn_later(self, text: str) -> None:
        """Warn with the next flush, in its thread."""
        self._later.append(text)

    def _restore(self) -> None:
        """If the file was removed or replaced, write its lines again: they are still there as long as it is open."""
        with self._writing:
            try:
                if os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno())):
                    return
                os.replace(self.path, kept := unused(self.path.with_name(f"{self.path.name}.replaced")))
                what = f"replaced by another file, which is now {kept.name}"
            except FileNotFoundError:
                what = "removed"
            self._file.seek(0)
            with atomic_write(self.path) as file:
                shutil.copyfileobj(self._file, file)
            self._file.close()
            self._file = self._open()
        self.warn_later(f"{self.path} was {what} while the run was training: its lines are written again")

    def truncate_to(self, step: int, *, repeated: Collection[str] = ()) -> None:
        """Drop what a run resumed at this step will write again: events of later steps, an incomplete last line, and the
        events of this step that come after the checkpoint (`repeated`). Events without a step stay.

        Unreadable lines in the middle are dropped too, with a warning, and a copy of the damaged file is kept."""
        kept: list[bytes] = []
        unreadable: list[int] = []
        lines = regular(self.path).read_bytes().split(NEWLINE)
        for number, line in enumerate(lines, 1):
            event = _event(line)
            if event is None:
                unreadable += [number] if number < len(lines) else []  # the last one is empty or incomplete
            elif event.get("step", 0) < step or (event.get("step", 0) == step and event["event"] not in repeated):
                kept.append(line + NEWLINE)
        if unreadable:
            self._keep_damaged(unreadable)
        self._file.close()
        with atomic_write(self.path) as file:
            file.writelines(kept)
        self._file = self._open()

    def _keep_damaged(self, lines: list[int]) -> None:
        copy = unused(self.path.with_name(f"{self.path.name}.damaged"))
        with writing(copy):
            shutil.copyfile(self.path, copy)
        where = ", ".join(map(str, lines[:5])) + (" …" if len(lines) > 5 else "")
        self.on_warning(f"{self.path} is damaged: {len(lines)} lines cannot be read ({where}); a copy is {copy.name}")

    def copy_to(self, folder: Path) -> None:
        """With the lines that could not be written."""
        with suppress(OSError):
            self._file.seek(0)  # the open file, which is there even if its name is not
            (folder / self.path.name).write_bytes(self._file.read() + self._pending)

    def close(self) -> None:
        """Write what is still pending, or raise."""
        if self._file.closed:
            return
        lost = self._pending.count(NEWLINE) + len(self._events)
        try:
            with writing(self.path, f"; its last {lost} lines are lost"):
                self._write_lines()
                self._restore()
        finally:
            self._file.close()
        for text in self._later:
            log.warning(text)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def event_line(event: Mapping[str, Any]) -> bytes:
    """One line of the file."""
    try:
        text = ENCODER.encode(event)
    except ValueError:  # a number that is not finite; looking for one in every event would take as long as writing it
        text = ENCODER.encode(_finite(event))
    return json_bytes(text) + NEWLINE


def copied(event: Mapping[str, Any]) -> dict[str, Any]:
    """For a listener that may change its own. The values of most events are immutable."""
    return {key: deepcopy(value) if isinstance(value, dict | list) else value for key, value in event.items()}


def _finite(value: Any) -> Any:
    """The value with non-finite numbers as strings, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return value
