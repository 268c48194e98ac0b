"""Files of an untrusted directory: opened only if they are regular files directly in it, read only up to a size limit.

File names may come from such a file too (the index of a sharded model), so anything but a plain name is refused: `../`, an
absolute path, a drive or a symlink could point anywhere. Pipes, which would block, and oversized files are refused unread.
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
    valid = isinstance(name, str) and name.isprintable() and not any(character in name for character in "/\\:")
    if isinstance(name, str) and valid and 0 < len(name) <= 255 and name not in (".", ".."):
        return name
    raise UntrustedFileError(f"{where}: {name!r:.120} is not a plain file name; all files of a model are in one directory")


def exists(folder: Path, name: str) -> bool:
    """Also for a dangling symlink; opening it gives the error."""
    return os.path.lexists(folder / name)


def open_plain(folder: Path, name: str) -> IO[bytes]:
    """Open a file directly in the folder for reading."""
    path = folder / check_name(name, str(folder))
    try:
        mode = os.lstat(path).st_mode
        file = os.fdopen(os.open(path, _OPEN_FLAGS), "rb") if stat.S_ISREG(mode) else None
    except (OSError, ValueError) as error:  # ValueError: a name that the operating system cannot encode
        raise UntrustedFileError(f"cannot read {path}: {getattr(error, 'strerror', error)}") from None
    if stat.S_ISLNK(mode):
        raise UntrustedFileError(f"{path} is a symlink, which could point anywhere; copy the directory with cp -rL")
    if file and stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # it may have been replaced in the meantime
        return file
    if file:
        file.close()
    raise UntrustedFileError(f"{path} is not a regular file")


def parse_json(content: bytes, where: str) -> dict[str, Any]:
    """A JSON object without duplicate keys, of which two readers could take different ones."""
    try:
        value = json.loads(content, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise UntrustedFileError(f"{where}: not JSON: {str(error)[:120]}") from None
    if not isinstance(value, dict):
        raise UntrustedFileError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def read_bytes(folder: Path, name: str, limit: int) -> bytes:
    with open_plain(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise UntrustedFileError(f"{folder / name}: {size:,} bytes; {name} may have at most {limit:,}")
        return file.read(size)  # read(limit) would allocate the limit


def read_json(folder: Path, name: str, limit: int) -> dict[str, Any]:
    return parse_json(read_bytes(folder, name, limit), str(folder / name))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r:.80} occurs twice")
    return found
