"""Commands whose stdout or stderr is closed, full, a pipe that nobody reads, or of an encoding that lacks most characters: a
training continues and says so once, any other command ends with one line and a status."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tapeless.output import Stream, ignore_write_errors


class Failing(io.StringIO):
    encoding = "ascii"  # type: ignore[assignment]

    def __init__(self, error: Exception | None = None):
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        if self.error is not None:
            raise self.error
        text.encode(self.encoding)
        return super().write(text)


ERRORS = [
    OSError(28, "No space left on device"),
    BrokenPipeError(32, "Broken pipe"),
    ValueError("I/O operation on closed file"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("this", ["stdout", "stderr"])
def test_a_training_says_once_what_fails(error: Exception, this: str):
    streams: dict[str, Any] = {"stdout": io.StringIO(), "stderr": io.StringIO(), this: Failing(error)}
    with redirect_stdout(streams["stdout"]), redirect_stderr(streams["stderr"]), ignore_write_errors():
        for _ in range(3):
            print("a line", file=getattr(sys, this), flush=True)
    other = streams["stderr" if this == "stdout" else "stdout"].getvalue()
    reason = getattr(error, "strerror", None) or str(error)
    assert other == f"warning: {this} cannot be written: {reason}; training continues\n"


def test_both_may_fail():
    with redirect_stdout(Failing(ERRORS[0])), redirect_stderr(Failing(ERRORS[1])), ignore_write_errors():
        print("a line", flush=True)
        print("a line", file=sys.stderr, flush=True)


def test_what_an_encoding_lacks_is_a_question_mark():
    inner = Failing()
    print("жa…", file=Stream(inner, lambda error: pytest.fail(str(error))), flush=True)
    assert inner.getvalue() == "?a?\n"


def command(words: str, shell: str) -> subprocess.CompletedProcess[str]:
    line = f"{sys.executable} -m tapeless {words} {shell}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize(
    ("shell", "status", "says"),
    [
        (">/dev/full", 1, "error[WRITE]: stdout could not be written: No space left on device\n"),
        ("2>/dev/full", 2, ""),
        (">&-", 2, "error[NO_SUCH_PATH]"),
        ("2>&-", 2, ""),
        ("<&- >&- 2>&-", 2, ""),
    ],
    ids=["stdout full", "stderr full", "stdout closed", "stderr closed", "all closed"],
)
def test_a_command(shell: str, status: int, says: str, tmp_path: Path):
    words = "train new --help" if status == 1 else f"data info {tmp_path / 'missing'}"
    done = command(words, shell)
    assert done.returncode == status, done.stderr
    assert done.stderr.startswith(says) if says else not done.stderr


def test_no_file_is_opened_under_the_number_of_a_closed_stream(tmp_path: Path):
    code = (
        "from tapeless.output import open_closed_streams as o; o(); f = open('x', 'w'); print('lost'); f.write(str(f.fileno()))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run(["bash", "-c", f'{sys.executable} -c "{code}" <&- >&- 2>&-'], cwd=tmp_path, check=True, env=environment)
    assert int((tmp_path / "x").read_text()) > 2
