"""The index of a source, and its two parts: the split depends on contents alone, and neither part is ever empty."""

import hashlib
import random

import numpy as np
import pytest

from tapeless.data.chunks import Chunk
from tapeless.data.split import (
    TRAIN,
    VAL,
    DocumentIndex,
    DocumentSource,
    Selection,
    all_documents,
    held_out,
    index_documents,
    num_copies,
    split_source,
    unseen_documents,
)
from tapeless.errors import DataError

WORDS = [f"document {i} " + "word " * (20 + i % 7) for i in range(200)]


def digests(texts: list[str]) -> np.ndarray:  # (n, 32) uint8
    return np.frombuffer(b"".join(hashlib.sha256(text.encode()).digest() for text in texts), np.uint8).reshape(-1, 32)


def split(texts: list[str]) -> tuple[list[str], list[str]]:  # training, validation
    mask = held_out(digests(texts), np.array([len(text) for text in texts]))
    assert mask is not None
    return [text for text, out in zip(texts, mask, strict=True) if not out], [
        text for text, out in zip(texts, mask, strict=True) if out
    ]


def test_several_are_split_whole():
    training, validation = split(WORDS)
    assert sorted(training + validation) == sorted(WORDS)
    assert 0.08 < sum(map(len, validation)) / sum(map(len, WORDS)) <= 0.1


def test_they_are_walked_in_the_order_of_their_hash():
    """Written down plainly, with dictionaries: what the arrays must come to."""
    room, wanted = sum(map(len, WORDS)) // 10, set()
    for text in sorted(WORDS, key=lambda text: hashlib.sha256(text.encode()).hexdigest()):
        if len(text) <= room:
            room -= len(text)
            wanted.add(text)
    assert set(split(WORDS)[1]) == wanted


def test_the_order_of_documents_does_not_matter():
    shuffled = WORDS[:]
    random.Random(0).shuffle(shuffled)
    assert set(split(shuffled)[1]) == set(split(WORDS)[1])
    assert split(shuffled)[0] == [text for text in shuffled if text in set(split(WORDS)[0])]


def test_copies_stay_on_one_side():
    training, validation = split(WORDS + WORDS[::-1])
    assert not set(training) & set(validation)
    assert len(training) + len(validation) == 400


@pytest.mark.parametrize("sizes", [(10, 10), (1000, 3), (5, 5, 5), (100, 1, 100)])
def test_few_documents_leave_neither_part_empty(sizes: tuple[int, ...]):
    texts = [chr(97 + i) * size for i, size in enumerate(sizes)]
    training, validation = split(texts)
    assert training
    assert validation
    assert sorted(training + validation) == sorted(texts)
    if min(sizes) * 10 <= sum(sizes):
        assert validation == [min(texts, key=len)]


def test_one_text_is_to_be_cut():
    assert held_out(digests(["one"]), np.array([3])) is None
    assert held_out(digests(["one", "one"]), np.array([3, 3])) is None


def test_copies_are_counted():
    assert num_copies(digests(["a", "b", "a", "a", "c", "b"])) == 3
    assert num_copies(digests(["a"])) == 0


def test_what_is_trained_on_is_not_validated_on():
    fresh, dropped = unseen_documents(index_of(source("b", "x", "a", "a")), index_of(source("a", "new", "b", "new", "c")))
    assert fresh.tolist() == [False, True, False, False, True]
    assert dropped == 3


def source(*texts: str) -> DocumentSource:
    return lambda: (Chunk(text, True) for text in texts)


def text_of(selection: Selection, part: int) -> str:
    return "".join(chunk.text for chunk in selection.chunks(separated=True) if chunk.part == part)


def both(source: DocumentSource) -> tuple[str, str]:  # training, validation
    selection = split_source(source, index_of(source))
    return text_of(selection, TRAIN), text_of(selection, VAL)


def index_of(source: DocumentSource) -> DocumentIndex:
    return index_documents(source(), "")


def test_an_index():
    stream = [Chunk("ab", False), Chunk("c", True), Chunk(" ", False), Chunk("\n", True), Chunk("é", True)]
    found = index_documents(stream, "name")
    assert found.sizes.tolist() == [3, 2, 1]
    assert found.blank.tolist() == [False, True, False]
    assert found.digests[0].tobytes() == hashlib.sha256(b"abc").digest()
    assert found.fingerprint == index_documents(source("abc", "é")(), "elsewhere").fingerprint


@pytest.mark.parametrize(("texts", "code"), [((), "EMPTY_DATA"), ((" ", "\n"), "ONLY_WHITESPACE")])
def test_nothing_to_train_on(texts: tuple[str, ...], code: str):
    with pytest.raises(DataError) as caught:
        index_documents(source(*texts)(), "a.txt")
    assert caught.value.code == code


def test_one_document_gives_its_last_tenth():
    text = "".join(chr(97 + i % 26) for i in range(1005))
    one = source(text)
    training, validation = both(one)
    assert training == text[:904]
    assert validation == text[904:]


def test_copies_of_one_text_are_split_within_it():
    text = "0123456789" * 3
    two = source(text, " ", text)
    training, validation = both(two)
    assert training == f"{text[:27]}\n\n{text[:27]}"
    assert validation == text[27:]


def test_joining():
    docs = source("a" * 30, "b" * 30 + "\n", "   ", "c" * 30, "x")
    training, validation = both(docs)
    assert training == f"{'a' * 30}\n\n{'b' * 30}\n\n{'c' * 30}"
    assert validation == "x"
    selection = split_source(docs, index_of(docs))
    assert (selection.num_characters(TRAIN), selection.num_characters(VAL)) == (91, 1)


def test_a_long_document_is_cut_inside_a_chunk():
    def chunked():
        return iter([Chunk("abc\n", False), Chunk("defghi\n", False), Chunk("jklmnopqr\n", True)])

    assert both(chunked) == ("abc\ndefghi\njklmnop", "qr\n")


def test_validation_text_that_is_also_trained_on_is_dropped():
    training, validation = source("one", "two", "three"), source("two", "four", " ", "four", "five")
    wanted, dropped = unseen_documents(index_of(training), index_of(validation))
    assert text_of(all_documents(training, index_of(training), TRAIN), TRAIN) == "one\n\ntwo\n\nthree"
    selection = all_documents(validation, index_of(validation), VAL, wanted)
    assert (text_of(selection, TRAIN), text_of(selection, VAL)) == ("", "four\n\nfive")
    assert dropped == 2
    with pytest.raises(DataError, match="every validation document is also in the training text"):
        unseen_documents(index_of(training), index_of(source("two")))


def test_a_source_that_changes_is_noticed():
    versions = iter([["first", "second"], ["first", "other"]])

    def changing():
        return (Chunk(text, True) for text in next(versions))

    selection = all_documents(changing, index_of(changing), TRAIN)
    with pytest.raises(DataError, match="document 2 was altered while it was read"):
        text_of(selection, TRAIN)
