"""From a configuration to a data set on disk, and back from disk alone."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tapeless.config import TrainConfig
from tapeless.data import corpora
from tapeless.data.files import file_sha256
from tapeless.data.loader import Loader, validation_windows
from tapeless.data.prepare import open_prepared, prepare, source_hashes, with_text
from tapeless.data.synthetic import ArithmeticSource, MarkovSource
from tapeless.data.tokenizer import ByteTokenizer
from tapeless.errors import DataError

TEXT = "".join(f"Line {i} of the größte text ever.\n" for i in range(400))


@pytest.fixture
def text_file(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    return str(path)


@pytest.fixture
def short_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    for source in (MarkovSource, ArithmeticSource):
        monkeypatch.setattr(source, "num_symbols", 50_000)


@pytest.mark.parametrize(
    ("tokenizer", "vocab_size"), [("bytes", 256), ("bytes", 300), ("bytes+chat", 300), ("char", None), ("bpe", 300)]
)
def test_a_file(text_file: str, tmp_path: Path, tokenizer: str, vocab_size: int | None):
    config = TrainConfig(dataset_path=text_file, tokenizer=tokenizer, seq_len=32)
    dataset = prepare(config, vocab_size, tmp_path / "data")
    cut = len(TEXT) * 9 // 10
    end = "" if tokenizer in ("bytes", "char") else "<|endoftext|>"
    assert dataset.tokenizer.decode(dataset.train) == TEXT[:cut] + end
    assert dataset.tokenizer.decode(dataset.val) == TEXT[cut:] + end
    assert dataset.bytes_per_token == len(TEXT[cut:].encode()) / len(dataset.val)
    assert dataset.num_documents == 1
    assert dataset.source == f"{text_file}: 1 document, {len(TEXT):,} characters"
    assert dataset.floor is dataset.true_source is None
    assert dataset.source_loss(validation_windows(dataset.val, 32)) is None
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        "data.json",
        "tokenizer.json",
        "train.bin",
        "train.starts.npy",
        "val.bin",
        "val.starts.npy",
    ]


def test_several_documents(tmp_path: Path):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text(f"<document {i} {'word ' * 20}>")
    dataset = prepare(TrainConfig(dataset_path=str(tmp_path / "*.txt"), seq_len=16), 256, tmp_path / "data")
    train, val = dataset.tokenizer.decode(dataset.train), dataset.tokenizer.decode(dataset.val)
    assert train.count("<") == train.count(">") == 36
    assert val.count("<") == val.count(">") == 4
    assert train.count(">\n\n<") == 35
    assert dataset.num_documents == 40
    assert dataset.train_starts is not None
    assert dataset.val_starts is not None
    assert (len(dataset.train_starts), len(dataset.val_starts)) == (36, 4)
    assert all(dataset.tokenizer.decode(dataset.train[s : s + 1]) == "<" for s in dataset.train_starts)


def test_documents_end_with_the_end_of_text(tmp_path: Path):
    """Instead of an empty line; whatever a document contains, it is the only special token. It has no bytes."""
    for i in range(20):
        (tmp_path / f"{i:02}.txt").write_text(f"document {i} <|endoftext|><|im_end|>")
    config = TrainConfig(dataset_path=str(tmp_path / "*.txt"), tokenizer="bytes+chat", seq_len=16)
    dataset = prepare(config, 259, tmp_path / "data")
    assert dataset.end_of_text == 256
    for tokens, starts, count in ((dataset.train, dataset.train_starts, 18), (dataset.val, dataset.val_starts, 2)):
        assert starts is not None
        assert np.flatnonzero(tokens[:] >= 256).tolist() == [*(starts[1:] - 1), len(tokens) - 1]
        assert (tokens[:] == 256).sum() == count
    assert dataset.bytes_per_token == (len(dataset.val) - 2) / len(dataset.val)
    assert dataset.baselines().uniform == pytest.approx(np.log(259))
    (tmp_path / "other.txt").write_text("another text")
    assert with_text(open_prepared(tmp_path / "data"), str(tmp_path / "other.txt")).val[:].tolist() == [*b"another text", 256]
    record = json.loads((tmp_path / "data" / "data.json").read_text())
    (tmp_path / "data" / "data.json").write_text(json.dumps({k: v for k, v in record.items() if k != "end_of_text"}))
    older = open_prepared(tmp_path / "data")  # data from before documents had an end
    assert with_text(older, str(tmp_path / "other.txt")).val[:].tolist() == [*b"another text"]


def test_resume_sees_the_same(text_file: str, tmp_path: Path):
    first = prepare(TrainConfig(dataset_path=text_file, tokenizer="char", seq_len=32), None, tmp_path / "data")
    Path(text_file).unlink()
    again = open_prepared(tmp_path / "data")
    np.testing.assert_array_equal(first.train, again.train)
    np.testing.assert_array_equal(first.val, again.val)
    assert again[3:9] == first[3:9]
    np.testing.assert_array_equal(first.train_starts, again.train_starts)
    assert again.tokenizer.fingerprint == first.tokenizer.fingerprint
    for sample in (0, 100, 1000):
        assert Loader(first.train, 32, 4, 0).batch(sample)[1].equal(Loader(again.train, 32, 4, 0).batch(sample)[1])


def test_the_fingerprint_is_of_the_content(text_file: str, tmp_path: Path):
    config = TrainConfig(dataset_path=text_file, seq_len=32)
    one = prepare(config, 256, tmp_path / "one").fingerprint
    assert prepare(config, 300, tmp_path / "two").fingerprint == one
    Path(text_file).write_text(TEXT + ".")
    assert prepare(config, 256, tmp_path / "three").fingerprint != one


@pytest.mark.usefixtures("short_sources")
@pytest.mark.parametrize("tokenizer", ["bytes", "char"])
@pytest.mark.parametrize("source", [MarkovSource(), ArithmeticSource()], ids=["markov", "arithmetic"])
def test_sources_have_a_floor(tmp_path: Path, source: MarkovSource | ArithmeticSource, tokenizer: str):
    config = TrainConfig(corpus=source.name, tokenizer=tokenizer, seq_len=64)
    for dataset in (prepare(config, None, tmp_path), open_prepared(tmp_path)):
        assert dataset.floor == source.entropy_rate
        assert dataset.bytes_per_token == 1
        loss = dataset.source_loss(validation_windows(dataset.val, 64))
        assert loss == pytest.approx(source.entropy_rate, rel=0.1)
        in_bytes = np.frombuffer(dataset.tokenizer.decode_bytes(dataset.val), np.uint8).astype(np.int64)
        ((tokens, targets),) = validation_windows(in_bytes, 64).batches(10**6)
        assert loss == source.loss(tokens[:, 0].numpy(), targets.numpy())


@pytest.mark.usefixtures("short_sources")
def test_merged_symbols_have_no_floor(tmp_path: Path):
    dataset = prepare(TrainConfig(corpus="arithmetic", tokenizer="bpe", seq_len=64), 300, tmp_path)
    assert dataset.floor is dataset.true_source is None


@pytest.mark.parametrize("corpus", ["stdlib", "stdlib-docs"])
def test_the_embedded_corpora(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpora, "LIMIT", 300_000)
    dataset = prepare(TrainConfig(corpus=corpus, seq_len=128), 256, tmp_path)
    assert dataset.num_documents > 5
    assert 0.02 < len(dataset.val) / (len(dataset.train) + len(dataset.val)) < 0.5


def test_a_character_of_the_validation_part_alone_has_an_id(tmp_path: Path):
    path = tmp_path / "text.txt"
    path.write_text("abc " * 100 + "xyz " * 5)
    dataset = prepare(TrainConfig(dataset_path=str(path), tokenizer="char", seq_len=8), None, tmp_path / "data")
    assert dataset.tokenizer.vocab_size == 7


def test_a_vocabulary_that_is_too_small(text_file: str, tmp_path: Path):
    with pytest.raises(
        DataError, match=r"vocab_size 255 is below the 256 ids of the tokenizer \(bytes\); set --vocab-size to 256"
    ):
        prepare(TrainConfig(dataset_path=text_file), 255, tmp_path / "data")


@pytest.mark.parametrize(
    ("size", "seq_len", "message"),
    [
        (100, 90, "training part has 90 tokens, but one window of seq_len 90 needs 91"),
        (100, 10, "validation part has 10 tokens, but one window of seq_len 10 needs 11"),
        (1, None, "training part has 0 tokens"),
        (11, None, None),
    ],
)
def test_too_little_text(tmp_path: Path, size: int, seq_len: int | None, message: str | None):
    path = tmp_path / "text.txt"
    path.write_text("x" * size)
    config = TrainConfig(dataset_path=str(path), seq_len=seq_len)
    if message is None:
        assert len(prepare(config, 256, tmp_path / "data").val) == 2
        return
    with pytest.raises(DataError, match=message):
        prepare(config, 256, tmp_path / "data")
    with pytest.raises(DataError, match=r"no prepared data here: data.json is missing"):
        open_prepared(tmp_path / "data")


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_altered_tokens_are_noticed(text_file: str, tmp_path: Path, name: str):
    prepare(TrainConfig(dataset_path=text_file, seq_len=32), 256, tmp_path / "data")
    path = tmp_path / "data" / name
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="the data changed since the run began"):
        open_prepared(tmp_path / "data")


def test_another_tokenizer_is_noticed(text_file: str, tmp_path: Path):
    prepare(TrainConfig(dataset_path=text_file, tokenizer="char", seq_len=32), None, tmp_path / "data")
    prepare(TrainConfig(dataset_path=text_file, seq_len=32), None, tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").replace(tmp_path / "data" / "tokenizer.json")
    with pytest.raises(DataError, match="written with tokenizer"):
        open_prepared(tmp_path / "data")


@pytest.mark.parametrize("content", ["", "[]", "{}", "null"])
def test_a_damaged_record(text_file: str, tmp_path: Path, content: str):
    prepare(TrainConfig(dataset_path=text_file, seq_len=32), 256, tmp_path / "data")
    (tmp_path / "data" / "data.json").write_text(content)
    with pytest.raises(DataError, match=r"data.json: damaged"):
        open_prepared(tmp_path / "data")


def test_a_newer_record(text_file: str, tmp_path: Path):
    prepare(TrainConfig(dataset_path=text_file, seq_len=32), 256, tmp_path / "data")
    path = tmp_path / "data" / "data.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 2}))
    with pytest.raises(DataError, match="format 2, this tapeless reads 1"):
        open_prepared(tmp_path / "data")
    path.write_text('{"format_version": 1}')
    with pytest.raises(DataError, match=r"data.json: damaged"):
        open_prepared(tmp_path / "data")


def test_validation_text_of_its_own(tmp_path: Path):
    for name, numbers in (("train", range(20)), ("val", range(15, 25))):
        lines = (json.dumps({"body": f"<document {i} {'word ' * 20}>"}) for i in numbers)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    paths = {"dataset_path": str(tmp_path / "train.jsonl"), "val_path": str(tmp_path / "val.jsonl")}
    dataset = prepare(TrainConfig(**paths, text_field="body", seq_len=16), 256, tmp_path / "data")
    assert dataset.tokenizer.decode(dataset.train).count("<") == 20
    assert dataset.tokenizer.decode(dataset.val).count("<") == 5  # 15 to 19 stand in the training text
    assert json.loads((tmp_path / "data" / "data.json").read_text())["val_dropped"] == 5


@pytest.mark.parametrize("tokenizer", ["bytes", "char"])
def test_prepared_data_is_taken_over(text_file: str, tmp_path: Path, tokenizer: str):
    first = prepare(TrainConfig(dataset_path=text_file, tokenizer=tokenizer, seq_len=32), 256, tmp_path / "data")
    config = TrainConfig(dataset_path=str(tmp_path / "data"), seq_len=32)
    again = prepare(config, 256, tmp_path / "run")
    assert again.fingerprint == first.fingerprint
    assert again.source == first.source
    np.testing.assert_array_equal(again.val, first.val)
    assert source_hashes(tmp_path / "run", config)[0] == source_hashes(tmp_path / "run", config)[1]
    shutil.rmtree(tmp_path / "data")  # the run has its own
    assert open_prepared(tmp_path / "run").fingerprint == first.fingerprint


def test_prepared_data_has_its_own_tokenizer(text_file: str, tmp_path: Path):
    prepare(TrainConfig(dataset_path=text_file, tokenizer="char", seq_len=32), 256, tmp_path / "data")
    ByteTokenizer().save(tmp_path / "other.json")
    config = TrainConfig(dataset_path=str(tmp_path / "data"), tokenizer=str(tmp_path / "other.json"))
    with pytest.raises(DataError, match="is prepared with a tokenizer of its own; leave --tokenizer"):
        prepare(config, 256, tmp_path / "run")
    with pytest.raises(DataError, match=r"vocab_size 5 is below the"):
        prepare(TrainConfig(dataset_path=str(tmp_path / "data")), 5, tmp_path / "run")


def test_a_text_that_moved_is_the_same_text(text_file: str, tmp_path: Path):
    prepare(TrainConfig(dataset_path=text_file, seq_len=32), 256, tmp_path / "data")
    (tmp_path / "moved.txt").write_text(TEXT)
    before, now = source_hashes(tmp_path / "data", TrainConfig(dataset_path=str(tmp_path / "moved.txt")))
    assert before == now


def test_damaged_starts_are_noticed(text_file: str, tmp_path: Path):
    prepare(TrainConfig(dataset_path=text_file, seq_len=32), 256, tmp_path / "data")
    for content in (b"", b"not an array", (tmp_path / "data" / "train.starts.npy").read_bytes()[:-8]):
        (tmp_path / "data" / "train.starts.npy").write_bytes(content)
        with pytest.raises(DataError, match=r"train.starts.npy: damaged"):
            open_prepared(tmp_path / "data")


def test_data_from_before_documents_were_kept(text_file: str, tmp_path: Path):
    folder = tmp_path / "data"
    first = prepare(TrainConfig(dataset_path=text_file, seq_len=32), 256, folder)
    for name in ("train.starts.npy", "val.starts.npy"):
        (folder / name).unlink()
    parts = (first.tokenizer.fingerprint, *(file_sha256(folder / name) for name in ("train.bin", "val.bin")))
    record = json.loads((folder / "data.json").read_text())
    record["fingerprint"] = hashlib.sha256(" ".join(parts).encode()).hexdigest()
    (folder / "data.json").write_text(json.dumps(record))
    assert open_prepared(folder).train_starts is None
