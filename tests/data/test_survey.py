"""What a first look keeps of a source, and the two parts that are made from it."""

import hashlib

import numpy as np
import pytest

from tapeless.data.pieces import Piece
from tapeless.data.survey import Source, divided, given, survey
from tapeless.errors import DataError


def source(*texts: str) -> Source:
    return lambda: (Piece(text, True) for text in texts)


def text_of(part) -> str:
    return "".join(piece.text for piece in part.texts())


def test_a_look():
    stream = [Piece("ab", False), Piece("c", True), Piece(" ", False), Piece("\n", True), Piece("é", True)]
    found = survey(stream, "name")
    assert found.sizes.tolist() == [3, 2, 1]
    assert found.blank.tolist() == [False, True, False]
    assert found.digests[0].tobytes() == hashlib.sha256(b"abc").digest()
    assert found.fingerprint == survey(source("abc", "é")(), "elsewhere").fingerprint


@pytest.mark.parametrize(("texts", "code"), [((), "EMPTY_DATA"), ((" ", "\n"), "ONLY_WHITESPACE")])
def test_nothing_to_train_on(texts: tuple[str, ...], code: str):
    with pytest.raises(DataError) as caught:
        survey(source(*texts)(), "a.txt")
    assert caught.value.code == code


def test_one_document_gives_its_last_tenth():
    text = "".join(chr(97 + i % 26) for i in range(1005))
    one = source(text)
    training, validation = divided(one, survey(one(), ""))
    assert text_of(training) == text[:904]
    assert text_of(validation) == text[904:]


def test_copies_of_one_text_are_split_within_it():
    text = "0123456789" * 3
    two = source(text, " ", text)
    training, validation = divided(two, survey(two(), ""))
    assert text_of(training) == f"{text[:27]}\n\n{text[:27]}"
    assert text_of(validation) == text[27:]


def test_joining():
    docs = source("a" * 30, "b" * 30 + "\n", "   ", "c" * 30, "x")
    training, validation = divided(docs, survey(docs(), ""))
    assert text_of(training) == f"{'a' * 30}\n\n{'b' * 30}\n\n{'c' * 30}"
    assert text_of(validation) == "x"
    assert training.num_characters == 91


def test_validation_text_that_is_also_trained_on_is_dropped():
    training, validation = source("one", "two", "three"), source("two", "four", " ", "four", "five")
    parts = given(training, survey(training(), ""), validation, survey(validation(), ""))
    assert text_of(parts[0]) == "one\n\ntwo\n\nthree"
    assert text_of(parts[1]) == "four\n\nfive"
    assert parts[2] == 2
    with pytest.raises(DataError, match="every validation document also stands in the training text"):
        given(training, survey(training(), ""), source("two"), survey(source("two")(), ""))


def test_a_source_that_changes_is_noticed():
    versions = iter([["first", "second"], ["first", "other"]])

    def changing():
        return (Piece(text, True) for text in next(versions))

    found = survey(changing(), "")
    training = divided(changing, found)[0]._replace(wanted=np.array([True, True]))
    with pytest.raises(DataError, match="document 2 was altered while it was read"):
        text_of(training)
