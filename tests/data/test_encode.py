"""Tokenizing by processes: the same ids in the same order, errors that come through, nothing left behind."""

import io
from pathlib import Path

import numpy as np
import pytest

from tapeless.data import encode
from tapeless.data.chunks import Chunk
from tapeless.data.encode import REPLY, Worker, batched, encode_chunks, packed, serve
from tapeless.data.tokenizer import CharTokenizer, make_tokenizer
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


def test_a_process_that_ends_is_noticed(saved: Path):
    worker = Worker(saved)
    worker._process.kill()
    worker._process.wait()
    with pytest.raises(TapelessError, match="a tokenizing process ended unexpectedly with status -9"):
        worker.ask(["text"] * 100_000)
    worker.close()


def test_an_error_comes_through(tmp_path: Path):
    def ask(*texts: str) -> tuple[int, bytes]:
        reply = io.BytesIO()
        serve(CharTokenizer("abc"), io.BytesIO(packed(list(texts))), reply)
        failed, size = REPLY.unpack(reply.getvalue()[: REPLY.size])
        assert len(reply.getvalue()) == REPLY.size + size
        return failed, reply.getvalue()[REPLY.size :]

    failed, ids = ask("ab", "", "c")
    assert not failed
    assert np.frombuffer(ids, "<u4").tolist() == [2, 0, 1, 0, 1, 2]
    failed, message = ask("ab", "x")
    assert failed
    assert message.startswith(b"character 'x' at position 0 is not among the 3 characters")
    CharTokenizer("abc").save(tmp_path / "tokenizer.json")
    worker = Worker(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="character 'x' at position 0"):
        worker.ask(["x"])
    assert worker.ask(["cab"])[0].tolist() == [2, 0, 1]
    worker.close()
