"""Processes with limits: whatever happens in one is one line of error here, and the next request has a new one."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tapeless.data.chat import renderer
from tapeless.data.worker import Limits, Worker
from tapeless.errors import DataError, TapelessError


def misbehaves() -> Callable[[bytes], list[bytes]]:
    """In the process."""

    def answer(what: bytes) -> list[bytes]:
        if what == b"loop":
            while True:
                pass
        if what == b"allocate":
            return [bytes(1 << 40)]
        if what == b"exit":
            os._exit(7)
        if what == b"abort":
            os.abort()
        if what == b"raise":
            raise ValueError("of a package\nin two lines")
        if what == b"known":
            raise DataError("known")
        print("noise that is no reply")
        return [what, str(os.getpid()).encode()]

    return answer


@pytest.fixture(scope="module")
def worker() -> Worker:
    return Worker(f"{__name__}:misbehaves", what="it", limits=Limits(0.3, 1 << 30))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (b"loop", "it took more than 0.3 s"),
        (b"allocate", "it: it needs more than 1 GiB of memory"),
        (b"exit", "it made its process end with status 7: a crash, or more than 1 GiB of memory"),
        (b"abort", "it made its process end with status -6"),
        (b"raise", "it: ValueError: of a package"),
        (b"known", "known"),
    ],
)
@pytest.mark.skipif(os.name != "posix", reason="an alarm of the operating system")
def test_one_line_and_a_new_process(worker: Worker, what: bytes, says: str):
    with pytest.raises(DataError) as caught:
        worker.ask(what)
    assert str(caught.value).startswith(says)
    assert worker.ask(b"fine")[0] == b"fine"


def test_modules_of_the_current_folder_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It may be a downloaded model's."""
    for name in ("struct", "jinja2", "tokenizers", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    renderer.cache_clear()
    assert renderer("{{ messages[0] }}")({"messages": ["a"]}) == "a"
    assert not (tmp_path / "ran").exists()


def test_an_idle_process_has_no_alarm(worker: Worker):
    before = worker.ask(b"fine")
    time.sleep(0.4)
    assert worker.ask(b"fine") == before


def test_killed_from_outside(worker: Worker):
    os.kill(int(worker.ask(b"fine")[1]), 9)
    with pytest.raises(TapelessError, match="it ended unexpectedly with status -9"):
        worker.ask(b"fine")
