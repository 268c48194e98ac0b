"""Files from a directory that somebody else made: opened only if they are plain files in it, read only up to a size.

A name may come from inside such a file (the index of a sharded model), so it is a bare name or it is refused: `../`, an
absolute path, a drive, a symlink could lead anywhere. What is neither a file nor small is refused before it is read: a pipe
would wait for ever, and a gigabyte of JSON is no configuration.
Tested by: tests/interop/test_untrusted.py."""

import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import IO, Any

from tapeless.errors import UntrustedFileError

MEBIBYTE = 1 << 20
_OPEN_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY", "O_CLOEXEC"))


def check_name(name: object, where: str) -> str:
    harmless = isinstance(name, str) and name.isprintable() and not any(character in name for character in "/\\:")
    if isinstance(name, str) and harmless and 0 < len(name) <= 255 and name not in (".", ".."):
        return name
    raise UntrustedFileError(f"{where}: {name!r:.120} is not the bare name of a file; a model lies in one directory")


def exists(folder: Path, name: str) -> bool:
    """Also a link that leads nowhere: whoever opens it is told what it is."""
    return os.path.lexists(folder / name)


def open_plain(folder: Path, name: str) -> IO[bytes]:
    """A file of the folder itself, for reading."""
    path = folder / check_name(name, str(folder))
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            raise UntrustedFileError(f"{path} is a symlink, which could lead anywhere; copy the directory with cp -rL")
        if not stat.S_ISREG(mode):
            raise UntrustedFileError(f"{path} is not a plain file")
        descriptor = os.open(path, _OPEN_FLAGS)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # it was replaced in between
            os.close(descriptor)
            raise UntrustedFileError(f"{path} is not a plain file")
    except OSError as error:
        raise UntrustedFileError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # a name that the operating system has no spelling for
        raise UntrustedFileError(f"{path}: cannot be read: {error}") from None
    return os.fdopen(descriptor, "rb")


def parse_json(content: bytes, where: str) -> dict[str, Any]:
    """A JSON object in which no name stands twice: two readers could take two different ones."""
    try:
        value = json.loads(content, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise UntrustedFileError(f"{where}: not JSON: {str(error)[:120]}") from None
    if not isinstance(value, dict):
        raise UntrustedFileError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def read_json(folder: Path, name: str, limit: int) -> dict[str, Any]:
    with open_plain(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise UntrustedFileError(f"{folder / name}: {size:,} bytes, but {name} has at most {limit:,}")
        return parse_json(file.read(size), str(folder / name))  # a buffer of the limit would be made whatever the size


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r:.80} stands there twice")
    return found
