"""metrics.jsonl: one event a line, each step exactly once, also after a kill and a resume.

A line is handed to the operating system whole as soon as it is written, so a killed process loses at most the half line it
was at; sync() before a checkpoint makes sure that no checkpoint outlives its lines. A line that the disk does not take is
kept and tried again with the next one: a full disk is no reason to end a training, or to leave a hole in its log. JSON has
no NaN and no infinity, and they must not vanish from a log: they are the strings "NaN", "Infinity" and "-Infinity", which
float() reads.
Tested by: tests/train/test_metrics_log.py."""

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tapeless.data.files import atomic_write, reason, unused, writing
from tapeless.errors import DataError, TapelessError

NEWLINE = b"\n"
log = logging.getLogger("tapeless")


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The events in order. The last line of a live or killed run may be half there and is then left out."""
    with open(path, "rb") as file:
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
def as_written(path: Path) -> Iterator[None]:
    """Around whoever takes events apart: one that is JSON and still not what was written here is the file's fault."""
    try:
        yield
    except TapelessError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: damaged: an event lacks what belongs to it, or has it of another kind: {error!r}") from error


def _event(line: bytes) -> dict[str, Any] | None:
    """What a line says; None where it is not one that was written here."""
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
        self._waiting = bytearray()  # what the disk has not taken yet
        self._failing = False
        self._file = self._open()

    def _open(self) -> IO[bytes]:
        with writing(self.path):
            return open(self.path, "ab", buffering=0)  # for the life of the run

    def append(self, event: Mapping[str, Any]) -> None:
        self._waiting += event_line(event)
        self._try(self._hand_over)

    def sync(self) -> None:
        """Before a checkpoint. One that outlives its lines is still better than none, so a failure is no error here."""
        self._try(self._hand_over)
        self._try(lambda: os.fsync(self._file.fileno()))

    def _hand_over(self) -> None:
        while self._waiting:
            del self._waiting[: self._file.write(self._waiting)]

    def _try(self, act: Callable[[], None]) -> None:
        """A failure is told once, until it is over."""
        try:
            act()
        except OSError as error:
            if not self._failing:
                self.on_warning(f"{self.path} could not be written: {reason(error)}; its lines are kept, training goes on")
            self._failing = True
        else:
            self._failing = bool(self._waiting)

    def truncate_to(self, step: int, *, repeated: Collection[str] = ()) -> None:
        """Drop what a run resumed at this step will write again: events of later steps, a half-written last line, and of
        this very step those kinds of event that come after the checkpoint (`repeated`). Events without a step stay.

        A line in the middle that cannot be read goes too, aloud, and the file that had it is kept."""
        kept: list[bytes] = []
        unreadable: list[int] = []
        lines = self.path.read_bytes().split(NEWLINE)
        for number, line in enumerate(lines, 1):
            event = _event(line)
            if event is None:
                unreadable += [number] if number < len(lines) else []  # the last one is empty, or half there
            elif event.get("step", 0) < step or (event.get("step", 0) == step and event["event"] not in repeated):
                kept.append(line + NEWLINE)
        if unreadable:
            self._keep_damaged(unreadable)
        self._file.close()
        with atomic_write(self.path) as file:
            file.writelines(kept)
        self._file = self._open()

    def _keep_damaged(self, lines: list[int]) -> None:
        kept = unused(self.path.with_name(f"{self.path.name}.damaged"))
        with writing(kept):
            shutil.copyfile(self.path, kept)
        where = ", ".join(map(str, lines[:5])) + (" …" if len(lines) > 5 else "")
        self.on_warning(f"{self.path} is damaged: {len(lines)} lines cannot be read ({where}); it is kept as {kept.name}")

    def close(self) -> None:
        """The last chance of what is still waiting."""
        if self._file.closed:
            return
        with self._file, writing(self.path, f"; its last {self._waiting.count(NEWLINE)} lines are lost"):
            self._hand_over()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def event_line(event: Mapping[str, Any]) -> bytes:
    """One line of the file."""
    return json.dumps(_finite(event), ensure_ascii=False, allow_nan=False).encode() + NEWLINE


def _finite(value: Any) -> Any:
    """The value with its non-finite numbers spelled out, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return value
