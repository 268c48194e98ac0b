"""Output that cannot end a training: `tapeless train new > log` on a full disk continues without printing.

A closed pipe (BrokenPipeError) is not a failing disk: it ends the command as usual.
Tested by: tests/faults/test_failing_writes.py."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any


class IgnoreWriteErrors:
    """A stream that drops what cannot be written; everything else is the wrapped stream's."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[..., object], *args: str) -> None:
        try:
            act(*args)
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def ignore_write_errors() -> Iterator[None]:
    streams: list[Any] = [sys.stdout, sys.stderr]
    with redirect_stdout(IgnoreWriteErrors(sys.stdout)), redirect_stderr(IgnoreWriteErrors(sys.stderr)):
        yield
    for stream in streams:
        try:
            stream.flush()
        except BrokenPipeError:
            raise
        except OSError:  # Python would flush again at exit, and fail then
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
