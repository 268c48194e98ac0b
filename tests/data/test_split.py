"""The split depends on contents alone, and neither part is ever empty."""

import hashlib
import random

import numpy as np
import pytest

from tapeless.data.split import cut_of, held_out, num_copies, unseen

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
    assert cut_of(1005) == 904


def test_copies_are_counted():
    assert num_copies(digests(["a", "b", "a", "a", "c", "b"])) == 3
    assert num_copies(digests(["a"])) == 0


def test_what_is_trained_on_is_not_validated_on():
    fresh = unseen(digests(["a", "new", "b", "new", "c"]), digests(["b", "x", "a", "a"]))
    assert fresh.tolist() == [False, True, False, False, True]
