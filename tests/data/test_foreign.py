"""Token files of nanoGPT and llm.c: read as they are, and what is said of those that cannot be."""

from pathlib import Path

import numpy as np
import pytest

from tapeless.config import TrainConfig
from tapeless.data.foreign import open_foreign, read_header
from tapeless.data.prepare import open_prepared, prepare, source_hashes
from tapeless.data.tokenizer import CharTokenizer
from tapeless.errors import DataError

IDS = np.random.default_rng(0).integers(0, 100, 2000).astype("<u2")


def llm_c(ids: np.ndarray, magic: int = 20240520, version: int = 1, count: int | None = None) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    return header.tobytes() + ids.astype("<u2").tobytes()


WRITERS = {"nanogpt": lambda ids: ids.astype("<u2").tobytes(), "llm.c": llm_c}


@pytest.mark.parametrize("kind", list(WRITERS))
def test_they_are_read_as_they_are(tmp_path: Path, kind: str):
    path = tmp_path / "tokens.bin"
    path.write_bytes(WRITERS[kind](IDS))
    assert read_header(path) == (kind, 2000)
    np.testing.assert_array_equal(open_foreign(path, 100), IDS)
    with pytest.raises(DataError) as caught:
        open_foreign(path, 50)
    assert caught.value.code == "BEYOND_VOCABULARY"


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (llm_c(IDS)[:-2], "BAD_TOKEN_FILE", "5022 bytes, expected 5024 for the 2000 tokens of its header"),
        (llm_c(IDS)[:600], "BAD_TOKEN_FILE", "600 bytes, expected 5024"),
        (llm_c(IDS, count=-1), "BAD_TOKEN_FILE", "for the -1 tokens"),
        (llm_c(IDS, magic=20240801), "BAD_TOKEN_FILE", "begins with magic 20240801, expected llm.c's 20240520"),
        (llm_c(IDS, version=2), "BAD_TOKEN_FILE", "version 2, expected version 1"),
        (b"TAPELESS" + bytes(100), "BAD_TOKEN_FILE", "the header of tapeless"),
        (b"abc", "BAD_TOKEN_FILE", "3 bytes, expected two for each token"),
        (b"", "BAD_TOKEN_FILE", "0 bytes"),
    ],
)
def test_what_is_no_token_file(tmp_path: Path, content: bytes, code: str, message: str):
    path = tmp_path / "tokens.bin"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        open_foreign(path, 65536)
    assert caught.value.code == code
    assert message in str(caught.value)


def folder_of(tmp_path: Path, kind: str, prefix: str = "") -> Path:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / f"{prefix}train.bin").write_bytes(WRITERS[kind](IDS[:1800]))
    (folder / f"{prefix}val.bin").write_bytes(WRITERS[kind](IDS[1800:]))
    return folder


@pytest.mark.parametrize(("kind", "prefix"), [("nanogpt", ""), ("llm.c", "tiny_shakespeare_")])
def test_a_run_takes_them_over(tmp_path: Path, kind: str, prefix: str):
    folder = folder_of(tmp_path, kind, prefix)
    tokenizer = CharTokenizer(chr(100 + i) for i in range(100))  # some characters take one byte, some two
    tokenizer.save(tmp_path / "tokenizer.json")
    config = TrainConfig(dataset_path=str(folder), tokenizer=str(tmp_path / "tokenizer.json"), seq_len=16)
    data = prepare(config, 256, tmp_path / "run")
    np.testing.assert_array_equal(data.train, IDS[:1800])
    np.testing.assert_array_equal(data.val, IDS[1800:])
    assert data.bytes_per_token == len(tokenizer.decode(IDS[1800:]).encode()) / 200
    again = open_prepared(tmp_path / "run")
    assert again.fingerprint == data.fingerprint
    assert again.train_starts is None
    before, now = source_hashes(tmp_path / "run", config)
    assert before == now


def test_a_tokenizer_has_to_be_given_and_no_pickle_is_read(tmp_path: Path):
    folder = folder_of(tmp_path, "nanogpt")
    (folder / "meta.pkl").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(DataError, match=r"say nothing of their tokenizer, and meta.pkl is a pickle, which is never") as caught:
        prepare(TrainConfig(dataset_path=str(folder)), 256, tmp_path / "run")
    assert caught.value.code == "NO_TOKENIZER"
    with pytest.raises(DataError, match="say nothing of their tokenizer"):
        prepare(TrainConfig(dataset_path=str(folder), tokenizer="char"), 256, tmp_path / "run")


def test_several_files_for_one_part(tmp_path: Path):
    folder = folder_of(tmp_path, "llm.c")
    (folder / "train_2.bin").write_bytes(llm_c(IDS))
    with pytest.raises(DataError, match="2 token files for train, expected one"):
        prepare(TrainConfig(dataset_path=str(folder)), 256, tmp_path / "run")
