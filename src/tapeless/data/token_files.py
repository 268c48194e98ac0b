"""Token files: 64 bytes of header, then the ids, little-endian, read through a memory map; and several of them as one stream.

    magic 8s · version u16 · width u16 (2 up to 65536 ids, else 4) · crc32 u32 of the header with 0 here · count u64 ·
    vocab_size u64 · tokenizer fingerprint 32s
Ids are checked against the vocabulary when written and when files are verified (verification.py): an id beyond it would read
another row of the embedding, or none. Sizes are Python integers throughout; a 32-bit seek broke a peer past 2 GiB.
Tested by: tests/data/test_token_files.py, tests/data/test_concat_tokens.py."""

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tapeless.data.files import atomic_write, writing
from tapeless.errors import BEYOND_VOCABULARY, TOO_FEW_TOKENS, TRUNCATED_DATA, UNREADABLE, DataError
from tapeless.regular import regular

HEADER = struct.Struct("<8sHHIQQ32s")
MAGIC, VERSION = b"TAPELESS", 1
BLOCK = 1 << 20  # ids processed at a time


class ConcatTokens:
    """Several memory-mapped token files as one sequence, without a copy.

    Indexed like an array by an integer, a slice or an array of positions; only what is indexed is read, and a window may
    span two files. Conversion to one array is refused, since it would read everything into memory."""

    def __init__(self, parts: list[np.memmap]):  # (n_i,) each, of one type
        self.parts, self.dtype = parts, parts[0].dtype
        self.itemsize = self.dtype.itemsize
        self.ends = np.cumsum([len(part) for part in parts], dtype=np.int64)  # (s,)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, key: Any) -> Any:
        """An integer gives one id, a slice (n,) ids, an array of positions an array of its shape."""
        if isinstance(key, slice):
            return self._slice(*key.indices(len(self)))
        return self._gather(np.asarray(key))[()]

    def _slice(self, start: int, stop: int, step: int) -> np.ndarray:  # (n,)
        if step != 1:
            raise IndexError("a slice of several token files must have step 1")
        begins = self.ends - [len(part) for part in self.parts]
        ranges = [(part, max(start - b, 0), max(stop - b, 0)) for part, b in zip(self.parts, begins.tolist(), strict=True)]
        return np.concatenate([as_plain(part)[first:last] for part, first, last in ranges])

    def _gather(self, positions: np.ndarray) -> np.ndarray:  # (…) integers -> (…) ids
        if positions.size and not (positions.min() >= 0 and positions.max() < len(self)):
            raise IndexError(f"positions {positions.min()} to {positions.max()} of {len(self)} tokens")
        which = np.searchsorted(self.ends, positions, side="right")  # (…) index of the file
        ids = np.empty(positions.shape, self.dtype)
        for file in np.unique(which):
            here = which == file
            ids[here] = as_plain(self.parts[file])[positions[here] - (self.ends[file - 1] if file else 0)]
        return ids

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"{len(self.parts)} token files are not converted to one array; index them, or take a slice")


Tokens = np.ndarray | ConcatTokens


def concat_tokens(parts: list[np.memmap]) -> Tokens:
    return parts[0] if len(parts) == 1 else ConcatTokens(parts)


def as_plain(tokens: Tokens) -> Tokens:
    """A memory map as the array beneath it, which is quicker to index. Called before each read: a file that was cut short in
    place since it was opened is an error, where reading beyond its end would kill the process (SIGBUS)."""
    if isinstance(tokens, ConcatTokens):
        return tokens  # which does the same with the files it reads
    if isinstance(tokens, np.memmap) and isinstance(tokens.base, mmap):
        size, expected = tokens.base.size(), tokens.offset + tokens.nbytes
        if size < expected:
            raise TRUNCATED_DATA(path=tokens.filename, size=size, expected=expected)
    return np.asarray(tokens)


def _pack(width: int, count: int, vocab_size: int, fingerprint: str) -> bytes:
    fields = (count, vocab_size, bytes.fromhex(fingerprint))
    crc = zlib.crc32(HEADER.pack(MAGIC, VERSION, width, 0, *fields))
    return HEADER.pack(MAGIC, VERSION, width, crc, *fields)


def check_ids(ids: np.ndarray, vocab_size: int, where: Path, first: int = 0) -> None:
    """first: the index of ids[0] in the file."""
    for start in range(0, len(ids), BLOCK):
        block = ids[start : start + BLOCK]
        wrong = np.flatnonzero((block < 0) | (block >= vocab_size))
        if len(wrong):
            index, token = first + start + int(wrong[0]), int(block[wrong[0]])
            raise BEYOND_VOCABULARY(path=where, index=index, token=token, vocab_size=vocab_size)


@contextmanager
def token_writer(path: Path, *, vocab_size: int, fingerprint: str) -> Iterator[Callable[[np.ndarray], None]]:
    """A function that appends ids (n,) of any integer type; the file appears at the end, or not at all."""
    width, count = 2 if vocab_size <= 1 << 16 else 4, 0

    def write(ids: np.ndarray) -> None:
        nonlocal count
        check_ids(ids, vocab_size, path, count)
        with writing(path):
            file.write(ids.astype(f"<u{width}").tobytes())
        count += len(ids)

    with atomic_write(path) as file:
        file.write(bytes(HEADER.size))
        yield write
        file.seek(0)
        file.write(_pack(width, count, vocab_size, fingerprint))


def write_tokens(path: Path, blocks: Iterable[np.ndarray], *, vocab_size: int, fingerprint: str) -> None:
    with token_writer(path, vocab_size=vocab_size, fingerprint=fingerprint) as write:
        for ids in blocks:
            write(ids)


def read_head(path: Path, count: int) -> tuple[int, bytes]:
    """The size of a file and its first bytes."""
    try:
        with open(regular(path), "rb") as file:
            return path.stat().st_size, file.read(count)
    except OSError as error:
        raise UNREADABLE(path=path, reason=error.strerror) from None


def open_tokens(path: Path, fingerprint: str | None) -> np.memmap:  # (count,) uint16 or uint32, read-only
    """The ids of a file that was written with the tokenizer of this fingerprint (None: any). Checks the header, not the ids."""
    again = "delete it and prepare the data again"
    size, header = read_head(path, HEADER.size)
    if len(header) < HEADER.size:
        raise DataError(f"{path}: {len(header)} bytes, but the header of a token file alone is {HEADER.size}; {again}")
    magic, version, width, _, count, vocab_size, written_with = HEADER.unpack(header)
    if magic != MAGIC:
        raise DataError(f"{path}: not a token file: begins with {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise DataError(f"{path}: token file of version {version}, this tapeless reads {VERSION}; use a newer tapeless")
    if header != _pack(width, count, vocab_size, written_with.hex()) or width not in (2, 4):
        raise DataError(f"{path}: the header was altered: its checksum does not match; {again}")
    if size != HEADER.size + count * width:
        raise DataError(f"{path}: {size} bytes, expected {HEADER.size + count * width} for {count} tokens; {again}")
    if fingerprint is not None and written_with.hex() != fingerprint:
        raise DataError(
            f"{path}: written with tokenizer {written_with.hex()[:12]}, but this one is {fingerprint[:12]}; "
            "use the tokenizer.json in the same directory"
        )
    if count == 0:
        raise DataError(f"{path}: holds no tokens; {again}")
    return np.memmap(path, f"<u{width}", "r", HEADER.size, (count,))


def require_window(num_tokens: int, seq_len: int, part: str) -> None:
    if num_tokens < seq_len + 1:
        most = max(num_tokens - 1, 1)
        raise TOO_FEW_TOKENS(part=part, count=num_tokens, seq_len=seq_len, needed=seq_len + 1, most=most)
