"""Files that are there whole or not at all: written beside their place, synced, then renamed onto it.

What the disk does not take is a WriteError, which names the file and says why.
Tested by: tests/data/test_files.py, tests/faults/test_failing_writes.py."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO, Any

from tapeless.errors import WriteError


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """A file object for the new content; a failure inside leaves what was at `path` before."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            remove_quietly(temporary)
            raise
        sync_folder(path.parent)


@contextmanager
def writing(path: Path, consequence: str = "") -> Iterator[None]:
    """What the operating system refuses inside is a WriteError about `path`."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        failure = WriteError(f"{path} could not be written: {reason(error)}{consequence}")
        failure.errno = error.errno
        raise failure from error


def reason(error: OSError) -> str:
    """`No space left on device`, without number and path."""
    return error.strerror or str(error)


def remove_quietly(path: Path) -> None:
    """For what is in nobody's way: the failure that led here is the one to be told."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def unused(path: Path) -> Path:
    """A name like this one that nothing has yet: `path-1`, `path-2`, …"""
    return next(new for n in count(1) if not (new := path.with_name(f"{path.name}-{n}")).exists())


def write_synced(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """A new file, on the disk when this returns. Its name, size and sha256 are those of what was handed over: what a failing
    disk makes of it will not fit to them."""
    size, digest = 0, hashlib.sha256()
    with open(path, "xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"name": path.name, "size": size, "sha256": digest.hexdigest()}


def sync_folder(path: Path) -> None:
    """A folder's entries to the disk: what was made, renamed and deleted in it."""
    if os.name != "posix":
        return  # elsewhere a folder cannot be opened, and renames are durable without
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def canonical_json(value: Any) -> bytes:
    """One spelling for equal values, to be hashed."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()


def readable_json(value: Any) -> bytes:
    """The spelling of every JSON file that is written here."""
    return json.dumps(value, ensure_ascii=False, indent=1).encode() + b"\n"


def write_json(path: Path, value: Any) -> None:
    with atomic_write(path) as file:
        file.write(readable_json(value))


def is_pickle(data: bytes) -> bool:
    """Whether a file that begins so is a pickle, or an archive of one as torch.save makes them."""
    head = data[:512]
    return (head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5")) or (head[:2] == b"PK" and b"data.pkl" in head)


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def link(source: Path, target: Path) -> None:
    """The same file under another name, or a copy where the disk has no links. Files of data are replaced, never written into,
    so the other name keeps its content."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
