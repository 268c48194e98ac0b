"""Tokenizing by processes: the same ids in the same order, errors that come through, nothing left behind."""

import os
from pathlib import Path

import numpy as np
import pytest

from tapeless.data import encode
from tapeless.data.chunks import Chunk
from tapeless.data.encode import ask, batched, encode_chunks
from tapeless.data.tokenizer import CharTokenizer, make_tokenizer
from tapeless.data.worker import Worker
from tapeless.errors import DataError, TapelessError

TEXTS = [f"document {i}: the cat sat on the mat {'and slept ' * (i % 9)}é漢🙂\n" for i in range(300)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    make_tokenizer("bpe", TEXTS, 400).save(path)
    return path


def test_processes_give_what_one_gives(saved: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(encode, "BATCH", 500)
    tokenizer = make_tokenizer(str(saved), [], None)
    stream = [Chunk(text, True) for text in TEXTS]
    one, two = (list(encode_chunks(tokenizer, saved, stream, num_characters=1 << 23, processes=n)) for n in (1, 2))
    assert len(one) == len(two) > 20
    for (batch, ids), (same_batch, same_ids) in zip(one, two, strict=True):
        assert batch == same_batch
        for text, a, b in zip(batch, ids, same_ids, strict=True):
            np.testing.assert_array_equal(a, b)
            assert tokenizer.decode(a) == text.text


def test_short_texts_need_no_process(saved: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(encode, "Worker", None)
    tokenizer = make_tokenizer(str(saved), [], None)
    ((_, ids),) = encode_chunks(tokenizer, saved, [Chunk("short", True)], num_characters=5, processes=2)
    assert tokenizer.decode(ids[0]) == "short"


def test_batches_keep_the_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(encode, "BATCH", 10)
    stream = [Chunk("x" * n, True) for n in (3, 4, 5, 30, 1, 9, 1)]
    assert [[len(chunk.text) for chunk in batch] for batch in batched(stream)] == [[3, 4], [5], [30], [1, 9], [1]]


def started(saved: Path) -> Worker:
    return Worker("tapeless.data.encode:answers", os.fsencode(saved), b"", what="a tokenizing process")


def test_a_process_that_ends_is_noticed(saved: Path):
    worker = started(saved)
    worker._process.kill()
    worker._process.wait()
    with pytest.raises(TapelessError, match="a tokenizing process ended unexpectedly with status -9"):
        ask(worker, ["text"] * 100_000)
    assert len(ask(worker, ["text"])) == 1  # by a new one
    worker.close()


def test_an_error_comes_through(tmp_path: Path):
    CharTokenizer("abc").save(tmp_path / "tokenizer.json")
    worker = started(tmp_path / "tokenizer.json")
    assert [ids.tolist() for ids in ask(worker, ["ab", "", "c"])] == [[0, 1], [], [2]]
    with pytest.raises(DataError, match=r"^character 'x' at position 0 is not among the 3 characters"):
        ask(worker, ["ab", "x"])
    assert ask(worker, ["cab"])[0].tolist() == [2, 0, 1]
    worker.close()
