"""Token files: 64 bytes of header, then the ids, little-endian, read through a memory map.

    magic 8s · version u16 · width u16 (2 up to 65536 ids, else 4) · crc32 u32 of the header with 0 here · count u64 ·
    vocab_size u64 · tokenizer fingerprint 32s
Ids are checked against the vocabulary when written and when opened: an id beyond it would read another row of the embedding,
or none. Sizes are Python integers throughout; a 32-bit seek broke a peer past 2 GiB.
Tested by: tests/data/test_shards.py."""

import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tapeless.data.files import atomic_write
from tapeless.errors import BEYOND_VOCABULARY, TOO_FEW_TOKENS, DataError

HEADER = struct.Struct("<8sHHIQQ32s")
MAGIC, VERSION = b"TAPELESS", 1
CHUNK = 1 << 20  # ids looked at in one go


def _pack(width: int, count: int, vocab_size: int, fingerprint: str) -> bytes:
    fields = (count, vocab_size, bytes.fromhex(fingerprint))
    crc = zlib.crc32(HEADER.pack(MAGIC, VERSION, width, 0, *fields))
    return HEADER.pack(MAGIC, VERSION, width, crc, *fields)


def check_ids(ids: np.ndarray, first: int, vocab_size: int, where: Path) -> None:
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(wrong):
        at, token = first + int(wrong[0]), int(ids[wrong[0]])
        raise BEYOND_VOCABULARY(path=where, index=at, token=token, vocab_size=vocab_size)


def write_tokens(path: Path, chunks: Iterable[np.ndarray], *, vocab_size: int, fingerprint: str) -> int:
    """Write ids as they come, atomically; returns how many."""
    width, count = 2 if vocab_size <= 1 << 16 else 4, 0
    with atomic_write(path) as file:
        file.write(bytes(HEADER.size))
        for ids in chunks:  # (n,) of any integer type
            check_ids(ids, count, vocab_size, path)
            file.write(ids.astype(f"<u{width}").tobytes())
            count += len(ids)
        file.seek(0)
        file.write(_pack(width, count, vocab_size, fingerprint))
    return count


def open_tokens(path: Path, fingerprint: str) -> np.memmap:  # (count,) uint16 or uint32, read-only
    """The ids of a file that was written with the tokenizer of this fingerprint."""
    again = "delete it and prepare the data again"
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            header = file.read(HEADER.size)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if len(header) < HEADER.size:
        raise DataError(f"{path}: {len(header)} bytes, but the header of a token file alone is {HEADER.size}; {again}")
    magic, version, width, _, count, vocab_size, written_with = HEADER.unpack(header)
    if magic != MAGIC:
        raise DataError(f"{path}: not a token file: begins with {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise DataError(f"{path}: token file of version {version}, this tapeless reads {VERSION}; use a newer tapeless")
    if header != _pack(width, count, vocab_size, written_with.hex()) or width not in (2, 4):
        raise DataError(f"{path}: the header was altered: its checksum does not fit; {again}")
    if size != HEADER.size + count * width:
        raise DataError(f"{path}: {size} bytes, expected {HEADER.size + count * width} for {count} tokens; {again}")
    if written_with.hex() != fingerprint:
        raise DataError(
            f"{path}: written with tokenizer {written_with.hex()[:12]}, but this one is {fingerprint[:12]}; "
            "use the tokenizer.json beside it"
        )
    if count == 0:
        raise DataError(f"{path}: holds no tokens; {again}")
    tokens = np.memmap(path, f"<u{width}", "r", HEADER.size, (count,))
    check_all(path, tokens, vocab_size)
    return tokens


def check_all(path: Path, tokens: np.memmap, vocab_size: int) -> None:  # (n,)
    """Every id of a file. It is read, not looked at through the map, whose pages would all stay in memory."""
    with open(path, "rb") as file:
        file.seek(tokens.offset)
        for first in range(0, len(tokens), CHUNK):
            check_ids(np.fromfile(file, tokens.dtype, CHUNK), first, vocab_size, path)


def require_window(num_tokens: int, seq_len: int, part: str) -> None:
    if num_tokens < seq_len + 1:
        most = max(num_tokens - 1, 1)
        raise TOO_FEW_TOKENS(part=part, count=num_tokens, seq_len=seq_len, needed=seq_len + 1, most=most)
