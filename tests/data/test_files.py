"""Files that are there whole or not at all."""

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from tapeless.data import files
from tapeless.data.files import atomic_write, canonical_json, readable_json, unused, write_json, write_synced
from tapeless.errors import WriteError


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.mark.parametrize("call", ["fsync", "replace", "mkdir"])
def test_a_failure_leaves_what_was_there_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str):
    path = tmp_path / "file.json"
    write_json(path, {"old": 1})
    monkeypatch.setattr(os, call, refuse)
    if call == "mkdir":
        path = tmp_path / "new" / "file.json"
    with pytest.raises(WriteError, match=f"{path} could not be written: Read-only file system"):
        write_json(path, {"new": 2})
    assert [file.name for file in tmp_path.iterdir()] == ["file.json"]
    assert (tmp_path / "file.json").read_bytes() == readable_json({"old": 1})


def test_the_first_failure_is_the_one_that_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(ZeroDivisionError), atomic_write(tmp_path / "file") as file:
        file.write(bytes([1 // 0]))
    assert not (tmp_path / "file").exists()


def test_what_was_handed_over_is_what_is_hashed(tmp_path: Path):
    record = write_synced(tmp_path / "file", [b"one", memoryview(b"two"), b""])
    assert record == {"name": "file", "size": 6, "sha256": hashlib.sha256(b"onetwo").hexdigest()}
    assert (tmp_path / "file").read_bytes() == b"onetwo"


def test_a_name_that_is_taken_is_not_used_again(tmp_path: Path):
    assert unused(tmp_path / "a.damaged").name == "a.damaged-1"
    (tmp_path / "a.damaged-1").mkdir()
    assert unused(tmp_path / "a.damaged").name == "a.damaged-2"


def test_a_large_file_is_hashed_and_synced_beside_its_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    chunks, synced = [bytes([i]) * (i % 5) for i in range(40)], []
    expected = write_synced(tmp_path / "file", chunks)
    monkeypatch.setattr(files, "LARGE", 3)
    monkeypatch.setattr(files, "SYNCED", 20)
    (tmp_path / "again").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", synced.append)
        assert write_synced(tmp_path / "again" / "file", chunks) == expected
    assert (tmp_path / "again" / "file").read_bytes() == b"".join(chunks)
    assert len(synced) == 4 + 1  # of 80 bytes: after each 20 and at the end

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        write_synced(tmp_path / "failed", chunks)


def test_a_machine_without_free_threads_writes_files_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The last checkpoint of a run, for one."""

    def refused(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Thread, "start", refused)
    monkeypatch.setattr(files, "SYNCED", files.LARGE)
    content = bytes(files.LARGE)
    found = write_synced(tmp_path / "a", [content, b"end", content])
    assert found["sha256"] == hashlib.sha256((tmp_path / "a").read_bytes()).hexdigest()
    assert found["size"] == 2 * files.LARGE + 3


def test_a_file_is_completed_after_the_main_thread_has_ended(tmp_path: Path):
    code = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tapeless.data.files import LARGE, write_synced

def write():
    time.sleep(0.2)
    write_synced(Path(sys.argv[1]), [bytes(LARGE)] * 2)

ThreadPoolExecutor(1).submit(write)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "file")], check=True)
    assert (tmp_path / "file").stat().st_size == 2 * files.LARGE


def test_json_of_any_text():
    """Also of a file name that is not UTF-8."""
    for text in ("é", "\udcff", "\ud800 é"):
        for form in (readable_json, canonical_json):
            assert json.loads(form({"name": text})) == {"name": text}
    assert readable_json("é") == '"é"\n'.encode()
