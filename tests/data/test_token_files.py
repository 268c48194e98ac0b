"""Token files come back as they were written, and a damaged one never comes back at all."""

from pathlib import Path

import numpy as np
import pytest

from tapeless.data.token_files import HEADER, check_ids, open_tokens, write_tokens
from tapeless.errors import DataError

FINGERPRINT = "ab" * 32


def written(folder: Path, vocab_size: int = 256, count: int = 1000) -> tuple[Path, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, vocab_size, count)
    path = folder / "tokens.bin"
    parts = [ids[:300], ids[300:300], ids[300:]]
    write_tokens(path, parts, vocab_size=vocab_size, fingerprint=FINGERPRINT)
    return path, ids


@pytest.mark.parametrize(("vocab_size", "width"), [(256, 2), (65536, 2), (65537, 4), (200_000, 4)])
def test_round_trip(tmp_path: Path, vocab_size: int, width: int):
    path, ids = written(tmp_path, vocab_size)
    tokens = open_tokens(path, FINGERPRINT)
    assert isinstance(tokens, np.memmap)
    assert tokens.dtype == np.dtype(f"<u{width}")
    np.testing.assert_array_equal(tokens, ids)
    assert path.stat().st_size == 64 + width * 1000
    assert path.read_bytes()[64:] == ids.astype(f"<u{width}").tobytes()
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


@pytest.mark.parametrize("wrong", [-1, 256, 70_000])
def test_ids_are_checked_when_written(tmp_path: Path, wrong: int):
    path = tmp_path / "tokens.bin"
    with pytest.raises(DataError, match=rf"token 13 is {wrong}, outside of the vocabulary of 256"):
        write_tokens(path, [np.zeros(10, int), np.array([0, 1, 2, wrong])], vocab_size=256, fingerprint=FINGERPRINT)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path: Path):
    path, ids = written(tmp_path)

    def broken():
        yield np.zeros(10, int)
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        write_tokens(path, broken(), vocab_size=256, fingerprint=FINGERPRINT)
    np.testing.assert_array_equal(open_tokens(path, FINGERPRINT), ids)
    assert [p.name for p in tmp_path.iterdir()] == ["tokens.bin"]


@pytest.mark.parametrize("position", range(HEADER.size))
def test_every_byte_of_the_header_is_guarded(tmp_path: Path, position: int):
    path, _ = written(tmp_path)
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"not a token file|of version|header was altered"):
        open_tokens(path, FINGERPRINT)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (0, "0 bytes, but the header"),
        (63, "63 bytes, but the header"),
        (64, "64 bytes, expected 2064"),
        (2063, "expected 2064"),
    ],
)
def test_a_truncated_file_is_refused(tmp_path: Path, size: int, message: str):
    path, _ = written(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match=message):
        open_tokens(path, FINGERPRINT)


def test_a_longer_file_is_refused(tmp_path: Path):
    path, _ = written(tmp_path)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(DataError, match="2065 bytes, expected 2064 for 1000 tokens"):
        open_tokens(path, FINGERPRINT)


def test_the_first_wrong_id_is_named(tmp_path: Path):
    path, _ = written(tmp_path)
    data = bytearray(path.read_bytes())
    data[64 + 2 * 500 + 1] = 1  # the high byte of token 500
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"token 500 is \d+, outside of the vocabulary of 256"):
        check_ids(open_tokens(path, FINGERPRINT), 256, path)


def test_another_tokenizer_is_refused(tmp_path: Path):
    path, _ = written(tmp_path)
    with pytest.raises(DataError, match=r"written with tokenizer abababababab, but this one is cdcdcdcdcdcd"):
        open_tokens(path, "cd" * 32)


def test_no_tokens_and_no_file(tmp_path: Path):
    path, _ = written(tmp_path, count=0)
    with pytest.raises(DataError, match="holds no tokens"):
        open_tokens(path, FINGERPRINT)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        open_tokens(tmp_path / "missing.bin", FINGERPRINT)
