"""metrics.jsonl: one event a line, each step exactly once, also after a kill and a resume.

A line is handed to the operating system whole as soon as it is written, so a killed process loses at most the half line it
was at; sync() before a checkpoint makes sure that no checkpoint outlives its lines. JSON has no NaN and no infinity, and they
must not vanish from a log: they are the strings "NaN", "Infinity" and "-Infinity", which float() reads.
Judged by: tests/train/test_metrics_log.py."""

import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from tapeless.data.files import atomic_write
from tapeless.errors import DataError


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The events in order. The last line of a live or killed run may be half there and is then left out."""
    with open(path, "rb") as file:
        lines = file.read().split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except ValueError:
            if number == len(lines):
                return
            raise DataError(f"{path}:{number}: expected a line of JSON, got {line[:40]!r}") from None
        yield event


class MetricsLog:
    """Appends events."""

    def __init__(self, path: Path):
        self.path = path
        self._file: IO[bytes] = open(path, "ab")  # noqa: SIM115  open for the life of the run

    def append(self, event: Mapping[str, Any]) -> None:
        self._file.write(event_line(event))
        self._file.flush()

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def truncate_to(self, step: int, *, redone: Collection[str] = ()) -> None:
        """Drop what a run resumed at this step will write again: events of later steps, a half-written last line, and of
        this very step those kinds of event that come after the checkpoint (`redone`). Events without a step stay."""
        kept = [
            event_line(event)
            for event in read_metrics(self.path)
            if event.get("step", 0) < step or (event.get("step", 0) == step and event["event"] not in redone)
        ]
        self.close()
        with atomic_write(self.path) as file:
            file.writelines(kept)
        self._file = open(self.path, "ab")  # noqa: SIM115

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def event_line(event: Mapping[str, Any]) -> bytes:
    """One line of the file."""
    return json.dumps(_finite(event), ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _finite(value: Any) -> Any:
    """The value with its non-finite numbers spelled out, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return value
