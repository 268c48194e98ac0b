"""The records of a .wandb file: LevelDB's log format, behind 7 bytes of W&B's own.

A file is blocks of 32 KiB; a record lies in them in one piece or several, each with a checksum, its length and its kind in
front, and no head of a piece crosses the end of a block. W&B has no reader of its own in Python.
Tested by: tests/report/test_wandb_records.py."""

import struct
from collections.abc import Iterator
from pathlib import Path

FRONT, BLOCK = 7, 32 * 1024
HEAD = struct.Struct("<IHB")  # checksum, length, kind
ONLY, FIRST, LAST = 1, 2, 4  # kinds of pieces; 3 is one in the middle, 0 is room that nothing was written into


def wandb_records(path: Path) -> Iterator[bytes]:
    """Each is a wandb_internal_pb2.Record. One that the end of the file cuts off is left out."""
    data, record, start = path.read_bytes(), b"", FRONT
    while start + HEAD.size <= len(data):
        room = BLOCK - start % BLOCK
        if room < HEAD.size:
            start += room
            continue
        _, length, kind = HEAD.unpack_from(data, start)
        end = start + HEAD.size + length
        if kind == 0 or end > len(data):
            return
        piece = data[start + HEAD.size : end]
        record = piece if kind in (ONLY, FIRST) else record + piece
        if kind in (ONLY, LAST):
            yield record
        start = end
