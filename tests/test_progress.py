"""A wait is announced within a second, on a terminal in one line, and only if printing was requested."""

import logging
import time

import pytest

from tapeless import progress
from tapeless.cli.main import StderrHandler
from tapeless.cli.options import say
from tapeless.progress import busy, shown, text


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SILENT", 0.05)
    monkeypatch.setattr(progress, "TICK", 0.01)


def log_record(text: str) -> None:
    StderrHandler().emit(logging.LogRecord("tapeless", logging.WARNING, "", 0, text, None, None))


def wait(seconds: float = 0.3) -> None:
    time.sleep(seconds)


def test_a_wait_is_lines_in_a_file(hurry: None, capsys: pytest.CaptureFixture):
    with shown(), busy("reading"):
        wait()
        with busy("compiling", since=time.monotonic() - 7):
            wait()
    lines = capsys.readouterr().err.splitlines()
    assert "reading …" in lines
    assert "compiling … 7 s" in lines
    assert text() == ""


def test_on_a_terminal_one_line_is_updated_and_erased(hurry: None, capsys: pytest.CaptureFixture, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with shown(), busy("reading"):
        wait()
    err = capsys.readouterr().err
    assert "\rreading …\x1b[K" in err
    assert err.endswith("\r\x1b[K")
    assert "\n" not in err


def test_nothing_is_said_unasked_or_while_another_shows_it(hurry: None, capsys: pytest.CaptureFixture):
    with busy("reading"):
        wait()
        with shown(), shown(False):
            assert text() == "reading …"
            wait()
    with shown():
        wait()
    assert capsys.readouterr() == ("", "")


def test_a_long_wait_is_said_seldom(hurry: None, capsys: pytest.CaptureFixture):
    with shown(), busy("reading", since=time.monotonic() - progress.OFTEN - 1):
        progress._progress._said = time.monotonic()
        wait()
    assert capsys.readouterr().err == ""


def test_a_compiled_kernel_is_named(capsys: pytest.CaptureFixture):
    pytest.importorskip("numba")
    from numba.core import event

    from tapeless.kernels.cpu import jit

    class Dispatcher:
        py_func = jit.array

    class OfTheUser:
        py_func = test_a_compiled_kernel_is_named

    with event.trigger_event("numba:compile", data={"dispatcher": OfTheUser}):
        assert text() == ""
    with event.trigger_event("numba:compile", data={"dispatcher": Dispatcher}):
        with event.trigger_event("numba:compile", data={"dispatcher": Dispatcher}):  # an inlined function
            assert "(jit, array)" in text()
        assert text().startswith("compiling CPU kernel ")
    assert text() == ""


@pytest.mark.parametrize("print_message", [say, log_record])
def test_a_message_is_printed_on_a_line_of_its_own(print_message, hurry: None, capsys: pytest.CaptureFixture, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with shown(), busy("exporting"):
        wait()
        print_message("said in between")
    before, _, after = capsys.readouterr().err.partition("said in between\n")
    assert before.endswith("\r\x1b[K")
    assert "exporting" in before
    assert "\n" not in before + after
