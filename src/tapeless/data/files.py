"""Atomic file writes: a temporary file in the same directory, synced, then renamed.

A failed write is a WriteError that names the file and the reason.
Tested by: tests/data/test_files.py, tests/faults/test_failing_writes.py."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from threading import Thread
from typing import IO, Any, TypeVar

from tapeless.errors import WriteError

LARGE = 2**20  # bytes that are worth hashing in another thread than the one that writes
SYNCED = 2**27  # bytes of a file between two syncs
T = TypeVar("T")


class Threads:
    """One for each task; the end of the block waits for all. A ThreadPoolExecutor takes no tasks once the main thread has
    ended, and a checkpoint that is being written then is to be completed."""

    def __init__(self) -> None:
        self._threads: list[Thread] = []

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work(*arguments))
            except BaseException as error:
                future.set_exception(error)

        thread = Thread(target=run)
        try:
            thread.start()
        except RuntimeError:  # no more threads (`ulimit -u`): in this one
            run()
        else:
            self._threads.append(thread)
        return future

    def __enter__(self) -> "Threads":
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join()


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """A file object for the new content; on failure `path` keeps its previous content."""
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
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


@contextmanager
def writing(path: Path, consequence: str = "") -> Iterator[None]:
    """Turn an OSError inside into a WriteError about `path`."""
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


def unused(path: Path) -> Path:
    """A similar name that does not exist yet: `path-1`, `path-2`, …"""
    return next(new for n in count(1) if not (new := path.with_name(f"{path.name}-{n}")).exists())


def unused_path(name: str, parent: Path = Path("runs")) -> Path:
    """A directory that does not exist yet: runs/tiny, runs/tiny-2, …"""
    stem = Path(name).stem
    paths = [parent / stem, *(parent / f"{stem}-{n}" for n in range(2, 10_000))]
    return next(path for path in paths if not path.exists())


def write_synced(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """A new file, synced when this returns. Its size and sha256 are those of the data passed in, so that what a failing disk
    stored does not match them."""
    size, unsynced, digest = 0, 0, hashlib.sha256()
    syncing: Future[None] | None = None
    with open(path, "xb") as file, Threads() as threads:
        for chunk in chunks:
            hashing = threads.submit(digest.update, chunk) if len(chunk) >= LARGE else None
            file.write(chunk)
            if hashing is None:
                digest.update(chunk)
            else:
                hashing.result()
            size, unsynced = size + len(chunk), unsynced + len(chunk)
            if unsynced >= SYNCED:  # while the rest is hashed, so that little is left at the end
                if syncing is not None:
                    syncing.result()
                syncing, unsynced = threads.submit(os.fsync, file.fileno()), 0
        if syncing is not None:
            syncing.result()
        file.flush()
        os.fsync(file.fileno())
    return {"name": path.name, "size": size, "sha256": digest.hexdigest()}


def sync_folder(path: Path) -> None:
    """Sync a folder's entries: what was created, renamed and deleted in it."""
    if os.name != "posix":
        return  # elsewhere a folder cannot be opened, and renames are durable anyway
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def canonical_json(value: Any) -> bytes:
    """The same bytes for equal values, for hashing."""
    return json_bytes(json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")))


def readable_json(value: Any) -> bytes:
    """The format of every JSON file that is written here."""
    return json_bytes(json.dumps(value, ensure_ascii=False, indent=1)) + b"\n"


def json_bytes(text: str) -> bytes:
    """Half of a surrogate pair, such as of a file name that is not UTF-8, becomes an escape of JSON."""
    return text.encode(errors="backslashreplace")


def write_json(path: Path, value: Any) -> None:
    with atomic_write(path) as file:
        file.write(readable_json(value))


def is_pickle(data: bytes) -> bool:
    """Whether a file that begins with `data` is a pickle, or an archive of one as torch.save writes."""
    head = data[:512]
    return (head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5")) or (head[:2] == b"PK" and b"data.pkl" in head)


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def link(source: Path, target: Path) -> None:
    """A hard link, or a copy if the file system has no links. What is written here replaces a file, never modifies it in
    place, so the other name keeps its content; what others do to it is noticed (verification.py)."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
