"""Files are read again only if they changed since they were verified, and a change is never missed."""

import json
import os
import shutil
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tapeless.config import TrainConfig
from tapeless.data import prepare as prepare_module
from tapeless.data import verification
from tapeless.data.loader import validation_set
from tapeless.data.prepare import fingerprints, open_prepared, prepare
from tapeless.data.token_files import write_tokens
from tapeless.data.tokenizer import ByteTokenizer
from tapeless.errors import DataError, WriteError

NAMES = {"train.bin", "val.bin", "train.starts.npy", "val.starts.npy"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Prepared data whose files were last modified a minute ago, verified since."""
    (tmp_path / "text.txt").write_text("".join(f"Line {i} of some text.\n" for i in range(400)))
    prepare(TrainConfig(dataset_path=str(tmp_path / "text.txt"), seq_len=32), 256, tmp_path / "data")
    age(tmp_path / "data")
    open_prepared(tmp_path / "data")
    return tmp_path / "data"


def age(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, (time.time() - 60, time.time() - 60))


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read in full."""
    names: list[str] = []
    scan = verification.scan_file

    def spy(path: Path, tokens: np.ndarray | None = None) -> verification.FileState:
        names.append(path.name)
        return scan(path, tokens)

    monkeypatch.setattr(verification, "scan_file", spy)
    return names


def record(folder: Path) -> dict:
    return json.loads((folder / "data.json").read_text())


def test_unaltered_files_are_not_read_again(folder: Path, scanned: list[str]):
    assert set(record(folder)["files"]) == NAMES
    assert fingerprints(folder)["dataset_fingerprint"] == open_prepared(folder).fingerprint
    assert scanned == []
    open_prepared(folder, full=True)
    assert set(scanned) == NAMES


def test_files_written_a_moment_ago_are_read_again(tmp_path: Path, scanned: list[str]):
    (tmp_path / "text.txt").write_text("some text " * 100)
    prepare(TrainConfig(dataset_path=str(tmp_path / "text.txt"), seq_len=8), 256, tmp_path / "data")
    assert record(tmp_path / "data")["files"] == {}
    assert len(scanned) == 4  # one pass for hash and ids
    stat = os.stat(tmp_path / "data" / "train.bin")
    content = bytearray((tmp_path / "data" / "train.bin").read_bytes())
    content[-2] ^= 1
    (tmp_path / "data" / "train.bin").write_bytes(content)
    os.utime(tmp_path / "data" / "train.bin", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(DataError, match="the data changed"):
        open_prepared(tmp_path / "data")


@pytest.mark.parametrize("how", ["in place", "replaced", "replaced with the same mtime"])
@pytest.mark.parametrize("name", ["train.bin", "val.bin", "train.starts.npy"])
def test_a_changed_file_is_noticed(folder: Path, scanned: list[str], name: str, how: str):
    path = folder / name
    content, stat = bytearray(path.read_bytes()), os.stat(path)
    if name.endswith(".npy"):
        content += content[-8:]  # another document, empty
        content = bytearray(bytes(content).replace(b"(1,)", b"(2,)"))
    else:
        content[-2] ^= 1
    if how == "in place":
        path.write_bytes(content)
    else:
        (folder / "new").write_bytes(content)
        if "mtime" in how:
            os.utime(folder / "new", ns=(stat.st_atime_ns, stat.st_mtime_ns))
        (folder / "new").replace(path)
    for _ in range(2):  # nothing is remembered of data that are not the run's
        with pytest.raises(DataError, match="the data changed"):
            open_prepared(folder)
        assert fingerprints(folder)["dataset_fingerprint"] != record(folder)["fingerprint"]
    assert set(scanned) == {name}


def test_ids_beyond_the_vocabulary_are_refused(folder: Path):
    tokens = bytearray((folder / "train.bin").read_bytes())
    tokens[64 + 2 * 500 + 1] = 1  # the high byte of token 500
    (folder / "train.bin").write_bytes(tokens)
    with pytest.raises(DataError, match=r"token 500 is \d+, outside of the vocabulary of 256"):
        open_prepared(folder)


def test_a_copy_is_verified_once_and_a_linked_run_not_at_all(folder: Path, scanned: list[str], tmp_path: Path):
    prepare(TrainConfig(dataset_path=str(folder), seq_len=32), 256, tmp_path / "run")
    assert scanned == []
    shutil.copytree(folder, tmp_path / "copy")
    age(tmp_path / "copy")
    for _ in range(2):
        open_prepared(tmp_path / "copy")
    assert sorted(scanned) == sorted(NAMES)


@pytest.mark.parametrize("files", [None, [], {"train.bin": 3}, {"train.bin": {"size": 1}}, {"train.bin": {}, "val.bin": None}])
def test_a_damaged_record_of_files_is_not_trusted(folder: Path, scanned: list[str], files: object):
    (folder / "data.json").write_text(json.dumps(record(folder) | {"files": files}))
    open_prepared(folder)
    assert set(scanned) == NAMES
    assert set(record(folder)["files"]) == NAMES


def test_baselines_are_stored_and_computed_once_for_older_data(folder: Path, monkeypatch: pytest.MonkeyPatch):
    stored = open_prepared(folder).baselines()
    assert record(folder)["baselines"] == stored._asdict()
    older = {name: value for name, value in record(folder).items() if name not in ("baselines", "files")}
    (folder / "data.json").write_text(json.dumps(older))
    assert open_prepared(folder).baselines() == stored
    assert record(folder)["baselines"] == stored._asdict()
    monkeypatch.setattr(prepare_module, "baselines", None)
    assert open_prepared(folder).baselines() == stored


def test_a_folder_that_cannot_be_written_is_read_all_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch):
    older = {name: value for name, value in record(folder).items() if name not in ("baselines", "files")}
    (folder / "data.json").write_text(json.dumps(older))

    def refuse(path: Path, value: object) -> None:
        raise WriteError(f"{path} could not be written")

    monkeypatch.setattr(prepare_module, "write_json", refuse)
    assert open_prepared(folder).baselines().bigram > 0
    assert record(folder) == older


def test_opening_and_evaluating_need_no_memory_for_each_token(tmp_path: Path):
    """4M tokens; a byte for each would be 4 MB."""
    folder, count = tmp_path / "data", 1 << 21
    (tmp_path / "text.txt").write_text("some text " * 100)
    prepare(TrainConfig(dataset_path=str(tmp_path / "text.txt"), seq_len=8), 256, folder)
    for part in ("train", "val"):
        ids = np.random.default_rng(0).integers(0, 256, count)
        write_tokens(folder / f"{part}.bin", [ids], vocab_size=256, fingerprint=ByteTokenizer().fingerprint)
    age(folder)
    (folder / "data.json").write_text(json.dumps(record(folder) | fingerprint_of(folder)))
    data = open_prepared(folder)
    data.baselines()
    tracemalloc.start()
    data = open_prepared(folder)
    data.baselines()
    for batch in validation_set(data, 128).batches(32):
        assert len(batch) == 2
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


def fingerprint_of(folder: Path) -> dict[str, str]:
    return {"fingerprint": fingerprints(folder)["dataset_fingerprint"]}
