"""Records in pieces over blocks, and a file that was cut off."""

from pathlib import Path

import pytest
from wandb_records import BLOCK, FIRST, FRONT, HEAD, LAST, ONLY, wandb_records

RECORDS = [b"first", b"", b"a" * (3 * BLOCK), b"b" * 100, b"c" * BLOCK, b"last"]
MIDDLE = 3


def written(records: list[bytes]) -> bytes:
    """As LevelDB's log format has it: a piece as long as the block lets it be, then the next."""
    data = bytearray(b":W&B\xe1\xbe\x00")
    for record in records:
        rest, begun = record, False
        while True:
            room = BLOCK - len(data) % BLOCK
            if room < HEAD.size:
                data += bytes(room)
                room = BLOCK
            piece, rest = rest[: room - HEAD.size], rest[room - HEAD.size :]
            kind = (MIDDLE if rest else LAST) if begun else (FIRST if rest else ONLY)
            data += HEAD.pack(0, len(piece), kind) + piece
            begun = True
            if not rest:
                break
    return bytes(data)


def test_all_of_them(tmp_path: Path):
    path = tmp_path / "run.wandb"
    path.write_bytes(written(RECORDS))
    assert list(wandb_records(path)) == RECORDS


@pytest.mark.parametrize("left", range(HEAD.size))
def test_no_head_crosses_the_end_of_a_block(tmp_path: Path, left: int):
    path = tmp_path / "run.wandb"
    records = [b"x" * (BLOCK - FRONT - HEAD.size - left), b"behind it"]
    path.write_bytes(written(records))
    assert list(wandb_records(path)) == records


def test_what_is_cut_off_is_left_out(tmp_path: Path):
    path, data = tmp_path / "run.wandb", written(RECORDS)
    for size, whole in ((len(data) - 1, 5), (2 * BLOCK, 2), (FRONT + HEAD.size + 4, 0), (FRONT, 0), (0, 0)):
        path.write_bytes(data[:size])
        assert list(wandb_records(path)) == RECORDS[:whole]


def test_resources_that_nothing_was_written_into_is_the_end(tmp_path: Path):
    path = tmp_path / "run.wandb"
    path.write_bytes(written(RECORDS[:2]) + bytes(1000))
    assert list(wandb_records(path)) == RECORDS[:2]
