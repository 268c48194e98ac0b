"""Which data files are known to be unaltered, so that opening a data set does not read all of it again.

Of each verified file data.json records size, mtime, inode, SHA-256 and the largest id. A file that still has that size, mtime
and inode is unaltered; any other is read again, in one pass for the hash and the ids. A file that was modified less than
SETTLED_NS ago is verified but not recorded: within the resolution of a file system's clock another write would keep its mtime.
A copied directory has other inodes, so the copy is verified once by itself.
Tested by: tests/data/test_verification.py."""

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tapeless.data.token_files import check_ids

SETTLED_NS = 2_000_000_000  # FAT's clock is the coarsest
READ = 1 << 22  # bytes at a time


class FileState(NamedTuple):
    size: int
    mtime_ns: int
    inode: int
    sha256: str
    max_id: int  # -1 where the file holds no ids


def scan_file(path: Path, tokens: np.ndarray | None = None) -> FileState:
    """Read a whole file; tokens: its memory map if it holds ids."""
    stat, digest, max_id = os.stat(path), hashlib.sha256(), -1
    with open(path, "rb") as file:
        digest.update(file.read(getattr(tokens, "offset", 0)))
        while block := file.read(READ):
            digest.update(block)
            if tokens is not None:
                max_id = max(max_id, int(np.frombuffer(block, tokens.dtype).max()))
    return FileState(stat.st_size, stat.st_mtime_ns, stat.st_ino, digest.hexdigest(), max_id)


def file_state(path: Path, tokens: np.ndarray | None, recorded: Any) -> FileState:
    """The recorded state if the file is unaltered since, else a new one."""
    try:
        known, stat = FileState(**recorded), os.stat(path)
    except TypeError:  # no such record, or a damaged one
        return scan_file(path, tokens)
    same = known[:3] == (stat.st_size, stat.st_mtime_ns, stat.st_ino)
    return known if same and isinstance(known.sha256, str) and type(known.max_id) is int else scan_file(path, tokens)


def to_record(states: Mapping[str, FileState]) -> dict[str, dict[str, Any]]:
    """What data.json may record of files by name."""
    now = time.time_ns()
    return {name: state._asdict() for name, state in states.items() if now - state.mtime_ns > SETTLED_NS}


def require_ids(path: Path, tokens: np.ndarray, vocab_size: int, state: FileState) -> None:
    if state.max_id >= vocab_size:
        check_ids(tokens, vocab_size, path)  # finds the first one
