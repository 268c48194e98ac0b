"""stdout and stderr, each of which may be closed, full, or the end of a pipe that nobody reads.

A training continues without them, and says so once on the other (`ignore_write_errors`). Any other command is run for what it
prints: it ends with one line and an exit status.
Tested by: tests/faults/test_output.py."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from typing import Any

from tapeless.errors import WriteError

NAMES = {1: "stdout", 2: "stderr"}


class Stream:
    """What cannot be encoded is written as `?`, and whatever else fails is passed to on_error; the rest is the wrapped
    stream's."""

    def __init__(self, stream: Any, on_error: Callable[[Exception], None]):
        self._stream, self._on_error = stream, on_error

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding or "ascii"
            self._try(self._stream.write, text.encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError) as error:  # ValueError: the file is closed
            self._on_error(error)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[..., object], *args: str) -> None:
        try:
            act(*args)
        except (OSError, ValueError) as error:
            self._on_error(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def ignore_write_errors() -> Iterator[None]:
    """Around a training."""
    streams = [sys.stdout, sys.stderr]
    failed: set[int] = set()

    def warn(this: int, error: Exception) -> None:
        if this in failed:
            return
        failed.add(this)
        text = f"warning: {NAMES[this + 1]} cannot be written: {_reason(error)}; training continues"
        print(text, file=wrapped[1 - this], flush=True)

    wrapped: list[Any] = [Stream(stream, partial(warn, this)) for this, stream in enumerate(streams)]
    with redirect_stdout(wrapped[0]), redirect_stderr(wrapped[1]):
        yield
    for stream in wrapped:
        stream.flush()
    for this in failed:
        _discard(this + 1)


def open_closed_streams() -> None:
    """A process that was started with stdin, stdout or stderr closed (`>&-`) would open its next file under that number, and
    whatever a library prints would be written into it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


@contextmanager
def command_output() -> Iterator[None]:
    """Around a command: output that cannot be written is its failure."""

    def fail(error: Exception) -> None:
        _discard(1)
        if isinstance(error, BrokenPipeError):
            raise error
        failed.append(WriteError(f"stdout could not be written: {_reason(error)}"))
        raise failed[0] from error

    failed: list[WriteError] = []
    stdout: Any = Stream(sys.stdout, fail)
    stderr: Any = Stream(sys.stderr, lambda error: _discard(2))
    with redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            yield
        except SystemExit:  # of --help
            stdout.flush()
            if failed:  # argparse has ignored it
                raise failed[0] from None
            raise
        except BaseException:  # which is the failure to report
            with suppress(OSError):
                stdout.flush()
            raise
        stdout.flush()


def complain(text: str) -> None:
    """The last line of a command that fails, on stderr if that is possible."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        _discard(2)


def _reason(error: Exception) -> object:
    cause = error.__cause__ or error
    return getattr(cause, "strerror", None) or cause


def _discard(descriptor: int) -> None:
    """What is left in the buffer: Python would write it at exit, and fail there."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)
