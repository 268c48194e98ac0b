"""Token files of nanoGPT and llm.c: read as they are, and what is said of those that cannot be."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tapeless.config import TrainConfig
from tapeless.data.external import open_external, read_header
from tapeless.data.info import data_info, sample_windows
from tapeless.data.loader import Loader, validation_windows
from tapeless.data.prepare import Dataset, open_prepared, prepare, source_hashes
from tapeless.data.token_files import ConcatTokens
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
    np.testing.assert_array_equal(open_external(path), IDS)


@pytest.mark.parametrize("kind", list(WRITERS))
def test_ids_beyond_the_vocabulary_are_refused_by_the_name_of_the_source(tmp_path: Path, kind: str):
    folder = folder_of(tmp_path, kind)
    CharTokenizer(chr(100 + i) for i in range(50)).save(tmp_path / "tokenizer.json")
    config = TrainConfig(dataset_path=str(folder), tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=re.escape(str(folder / "train.bin"))) as caught:
        prepare(config, 256, tmp_path / "run")
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
        open_external(path)
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
    with pytest.raises(DataError, match=r"do not name their tokenizer, and meta.pkl is a pickle, which is never") as caught:
        prepare(TrainConfig(dataset_path=str(folder)), 256, tmp_path / "run")
    assert caught.value.code == "NO_TOKENIZER"
    with pytest.raises(DataError, match="do not name their tokenizer"):
        prepare(TrainConfig(dataset_path=str(folder), tokenizer="char"), 256, tmp_path / "run")


def shards_of(folder: Path, train: list[np.ndarray], val: list[np.ndarray], name: str = "fineweb") -> Path:
    """As llm.c writes them: the validation part has number 0."""
    folder.mkdir()
    for part, arrays, first in (("train", train, 1), ("val", val, 0)):
        for number, ids in enumerate(arrays, first):
            (folder / f"{name}_{part}_{number:06d}.bin").write_bytes(llm_c(ids))
    return folder


def taken(path: object, out: Path, **changes: int) -> Dataset:
    return prepare(TrainConfig(dataset_path=str(path), **{"seq_len": 16, **changes}), 256, out)


CUTS = np.split(IDS[:1800], [1, 700, 705, 1500])


def test_several_files_of_llm_c_are_one_stream(tmp_path: Path):
    one = taken(shards_of(tmp_path / "one", [IDS[:1800]], [IDS[1800:]]), tmp_path / "a")
    folder = shards_of(tmp_path / "many", CUTS, [IDS[1800:1900], IDS[1900:]])
    many = taken(folder, tmp_path / "b")
    assert isinstance(many.train, ConcatTokens)
    assert all(isinstance(part, np.memmap) for part in many.train.parts)  # nothing is in memory
    np.testing.assert_array_equal(many.train[:], IDS[:1800])
    np.testing.assert_array_equal(many.val[:], IDS[1800:])
    assert many.bytes_per_token == one.bytes_per_token
    assert many.baselines() == pytest.approx(one.baselines())
    for sample in (0, 7, 300):
        found, expected = (Loader(data.train, 16, 4, seed=3).batch(sample) for data in (many, one))
        assert all(map(torch.equal, found, expected))
    found, expected = (next(validation_windows(data.val, 16).batches(99)) for data in (many, one))
    assert all(map(torch.equal, found, expected))
    assert sample_windows(many, "train", 5, 40, 0) == sample_windows(one, "train", 5, 40, 0)
    by_pattern = taken(folder / "*.bin", tmp_path / "c")
    assert by_pattern.fingerprint == many.fingerprint
    assert len(taken(folder / "fineweb_*_00000[012].bin", tmp_path / "d").train) == 700
    assert data_info(folder, "text") == {
        "format": "llm.c",
        "training_files": 5,
        "training_tokens": 1800,
        "validation_files": 2,
        "validation_tokens": 200,
        "largest_id": int(IDS.max()),
    }


def test_the_hash_is_of_every_file_and_of_the_part_it_is_in(tmp_path: Path):
    a, b, c = np.split(IDS[:1500], 3)
    parts = {
        "as it is": ([a, b], [c]),
        "other order": ([b, a], [c]),
        "other part": ([a], [b, c]),
        "other cut": ([IDS[:1000]], [c]),
    }
    found = {}
    for name, (train, val) in parts.items():
        data = taken(shards_of(tmp_path / name, train, val), tmp_path / f"{name} run")
        before, now = source_hashes(tmp_path / f"{name} run", TrainConfig(dataset_path=str(tmp_path / name)))
        assert before == now
        found[name] = data.fingerprint, before
    assert len({fingerprint for fingerprint, _ in found.values()}) == len({digest for _, digest in found.values()}) == 4


def test_a_file_that_changes_or_goes_is_seen(tmp_path: Path):
    folder = shards_of(tmp_path / "theirs", CUTS, [IDS[1800:]])
    taken(folder, tmp_path / "run")
    assert open_prepared(tmp_path / "run").fingerprint
    shard = tmp_path / "run" / "train-000003.bin"
    kept = shard.read_bytes()
    shard.unlink()
    with pytest.raises(DataError, match="the data changed since the run began"):
        open_prepared(tmp_path / "run")
    shard.write_bytes(kept[:-2] + b"\0\0")
    with pytest.raises(DataError, match="the data changed since the run began"):
        open_prepared(tmp_path / "run")
    shard.write_bytes(kept[:-2])
    with pytest.raises(DataError, match=r"train-000003.bin: 2612 bytes, expected 2614"):
        open_prepared(tmp_path / "run")


def test_files_that_are_not_one_text(tmp_path: Path):
    folder = shards_of(tmp_path / "theirs", CUTS, [IDS[1800:]])
    (folder / "other_train_000001.bin").write_bytes(llm_c(IDS))
    with pytest.raises(DataError, match="for train are of several sets: fineweb_train, other_train; name one by a pattern"):
        taken(folder, tmp_path / "run")
    assert len(taken(folder / "fineweb_*.bin", tmp_path / "run").train) == 1800
    with pytest.raises(DataError, match="5 token files, but none with train or none with val in its name"):
        taken(folder / "fineweb_train_*.bin", tmp_path / "other")
    (folder / "other_train_000001.bin").unlink()
    (folder / "fineweb_train_000009.bin").write_bytes(IDS.tobytes())
    with pytest.raises(DataError, match=r"6 files for train, but fineweb_train_000009\.bin is of nanogpt"):
        taken(folder, tmp_path / "other")
