"""Which data files are known to be unaltered, so that opening a data set does not read all of it again.

Of each verified file data.json records size, mtime, inode, ctime, number of links, SHA-256 and the largest id. A file that
still has those is unaltered; any other is read again, in one pass for the hash and the ids. The ctime is there because a
program that writes into a file may set its mtime back, but not its ctime. A new link to a file, such as that of another run on
the same data, changes the ctime too, and is the one change after which the file is not read again. A file that was modified
less than SETTLED_NS ago is verified but not recorded: within the resolution of a file system's clock another write would keep
its mtime. A copied directory has other inodes, so the copy is verified once by itself.
Tested by: tests/data/test_verification.py."""

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tapeless.data.token_files import check_ids
from tapeless.errors import ALTERED_DATA

SETTLED_NS = 2_000_000_000  # FAT's clock is the coarsest
READ = 1 << 22  # bytes at a time


class FileState(NamedTuple):
    size: int
    mtime_ns: int
    inode: int
    sha256: str
    max_id: int  # -1 where the file holds no ids
    ctime_ns: int
    nlink: int


def scan_file(path: Path, tokens: np.ndarray | None = None) -> FileState:
    """Read a whole file; tokens: its memory map if it holds ids."""
    stat, digest, max_id = os.stat(path), hashlib.sha256(), -1
    with open(path, "rb") as file:
        digest.update(file.read(getattr(tokens, "offset", 0)))
        while block := file.read(READ):
            digest.update(block)
            if tokens is not None:
                max_id = max(max_id, int(np.frombuffer(block, tokens.dtype).max()))
    return FileState(stat.st_size, stat.st_mtime_ns, stat.st_ino, digest.hexdigest(), max_id, stat.st_ctime_ns, stat.st_nlink)


def file_state(path: Path, tokens: np.ndarray | None, recorded: Any) -> FileState:
    """The recorded state if the file is unaltered since, else a new one."""
    try:
        known, stat = FileState(**recorded), os.stat(path)
    except TypeError:  # no such record, or a damaged one
        return scan_file(path, tokens)
    same = known[:3] == (stat.st_size, stat.st_mtime_ns, stat.st_ino)
    same = same and (known.ctime_ns == stat.st_ctime_ns or known.nlink != stat.st_nlink)
    if not (same and isinstance(known.sha256, str) and type(known.max_id) is int):
        return scan_file(path, tokens)
    return known._replace(ctime_ns=stat.st_ctime_ns, nlink=stat.st_nlink)


def require_unaltered(folder: Path, states: dict[str, FileState]) -> None:
    """Raise if a file that is in use was written into since it was opened. What was
    replaced, moved or deleted is still open as it was. States of files that were touched alone are updated."""
    for name, state in states.items():
        path = folder / name
        try:
            if os.stat(path).st_ino != state.inode:
                continue
            now = file_state(path, None, state._asdict())
        except OSError:
            continue
        if now.sha256 != state.sha256:
            raise ALTERED_DATA(path=path, expected=state.sha256[:12], got=now.sha256[:12])
        states[name] = now._replace(max_id=state.max_id)


def to_record(states: Mapping[str, FileState]) -> dict[str, dict[str, Any]]:
    """What data.json may record of files by name."""
    now = time.time_ns()
    return {name: state._asdict() for name, state in states.items() if now - state.mtime_ns > SETTLED_NS}


def require_ids(path: Path, tokens: np.ndarray, vocab_size: int, state: FileState) -> None:
    if state.max_id >= vocab_size:
        check_ids(tokens, vocab_size, path)  # finds the first one
