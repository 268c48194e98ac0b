"""The split depends on contents alone, and neither part is ever empty."""

import random

import pytest

from tapeless.data.split import join, split

WORDS = [f"document {i} " + "word " * (20 + i % 7) for i in range(200)]


def test_one_document_gives_its_last_tenth():
    text = "".join(chr(97 + i % 26) for i in range(1005))
    (training,), (validation,) = split([text])
    assert training + validation == text
    assert len(training) == 904


def test_several_are_split_whole():
    training, validation = split(WORDS)
    assert sorted(training + validation) == sorted(WORDS)
    assert 0.08 < sum(map(len, validation)) / sum(map(len, WORDS)) <= 0.1


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


def test_copies_of_one_text_are_split_within_it():
    text = "0123456789" * 3
    assert split([text, text]) == ([text[:27]] * 2, [text[27:]])


def test_joining():
    assert join(["a", "b\n", "c"]) == "a\n\nb\n\nc"
    assert join(["only"]) == "only"
    assert join([]) == ""
