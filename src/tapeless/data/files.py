"""Files that are there whole or not at all: written beside their place, synced, then renamed onto it."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """A file object for the new content; a failure inside leaves what was at `path` before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # elsewhere a folder cannot be opened, and renames are durable without
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def canonical_json(value: Any) -> bytes:
    """One spelling for equal values, to be hashed."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()


def write_json(path: Path, value: Any) -> None:
    with atomic_write(path) as file:
        file.write(json.dumps(value, ensure_ascii=False, indent=1).encode() + b"\n")


def is_pickle(data: bytes) -> bool:
    """Whether a file that begins so is a pickle, or an archive of one as torch.save makes them."""
    head = data[:512]
    return (head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5")) or (head[:2] == b"PK" and b"data.pkl" in head)


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
