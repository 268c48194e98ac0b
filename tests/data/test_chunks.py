"""Text in chunks: nothing is lost, no id changes, and no chunk is much longer than it should be."""

import random

import numpy as np
import pytest

from tapeless.data import chunks as module
from tapeless.data.chunks import Chunk, chunk_text, document_chunks
from tapeless.data.tokenizer import ByteTokenizer, make_tokenizer

PROSE = "The cat sat on the mat, and it wasn't amused: 42 mice!\n\n  They'd left.\n" * 30


def blocks(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


@pytest.mark.parametrize("size", [1, 13, 10**6])
def test_chunks_do_not_change_the_ids(monkeypatch: pytest.MonkeyPatch, size: int):
    monkeypatch.setattr(module, "CHUNK", 40)
    rng = random.Random(0)
    words = ["\n", "\n", " ", "  ", "word", "it's", "don't", "42", "...", "\t", "é", "\r\n"]
    text = "".join(rng.choice(words) for _ in range(3000))
    bpe = make_tokenizer("bpe", [PROSE], 400)
    for whole in (text, PROSE, "no newline at all " * 20, ""):
        parts = list(chunk_text(blocks(whole, size)))
        assert "".join(parts) == whole
        for tokenizer in (ByteTokenizer(), bpe):
            ids = np.concatenate([np.zeros(0, int), *tokenizer.encode_all(parts)])
            np.testing.assert_array_equal(ids, tokenizer.encode(whole))
    assert len(list(chunk_text([text]))) > 50


def test_a_long_line_is_cut_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "CHUNK", 40)
    for text in ("word " * 500, "x" * 3000):
        parts = list(chunk_text(blocks(text, 7)))
        assert "".join(parts) == text
        assert max(map(len, parts)) <= 4 * 40 + 7


def test_the_last_chunk_is_marked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "CHUNK", 3)
    assert list(document_chunks(["a\nbcd\nefgh\n", "i"])) == [
        Chunk("a\nbcd", False),
        Chunk("\nefgh", False),
        Chunk("\ni", True),
    ]
    assert list(document_chunks([])) == list(document_chunks([""])) == [Chunk("", True)]
