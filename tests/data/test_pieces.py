"""Texts in pieces: nothing is lost, no id changes, and no piece is much longer than it should be."""

import random

import numpy as np
import pytest

from tapeless.data import pieces as module
from tapeless.data.pieces import Piece, clipped, document, pieces
from tapeless.data.tokenizer import ByteTokenizer, make_tokenizer

PROSE = "The cat sat on the mat, and it wasn't amused: 42 mice!\n\n  They'd left.\n" * 30


def chunks(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


@pytest.mark.parametrize("size", [1, 13, 10**6])
def test_pieces_do_not_change_the_ids(monkeypatch: pytest.MonkeyPatch, size: int):
    monkeypatch.setattr(module, "PIECE", 40)
    rng = random.Random(0)
    words = ["\n", "\n", " ", "  ", "word", "it's", "don't", "42", "...", "\t", "é", "\r\n"]
    text = "".join(rng.choice(words) for _ in range(3000))
    bpe = make_tokenizer("bpe", [PROSE], 400)
    for whole in (text, PROSE, "no newline at all " * 20, ""):
        parts = list(pieces(chunks(whole, size)))
        assert "".join(parts) == whole
        for tokenizer in (ByteTokenizer(), bpe):
            ids = np.concatenate([np.zeros(0, int), *tokenizer.encode_all(parts)])
            np.testing.assert_array_equal(ids, tokenizer.encode(whole))
    assert len(list(pieces([text]))) > 50


def test_a_long_line_is_cut_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "PIECE", 40)
    for text in ("word " * 500, "x" * 3000):
        parts = list(pieces(chunks(text, 7)))
        assert "".join(parts) == text
        assert max(map(len, parts)) <= 4 * 40 + 7


def test_the_last_piece_is_marked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "PIECE", 3)
    assert list(document(["a\nbcd\nefgh\n", "i"])) == [Piece("a\nbcd", False), Piece("\nefgh", False), Piece("\ni", True)]
    assert list(document([])) == list(document([""])) == [Piece("", True)]


def test_documents_are_clipped():
    stream = [Piece("abc", False), Piece("def", True), Piece("ghij", True)]
    assert "".join(text for text, _ in clipped(stream, 0, 4)) == "abcdghij"
    assert "".join(text for text, _ in clipped(stream, 2, None)) == "cdefij"
