"""The word cache: the package's own ids for every kind of text, and which tokenizers may use it."""

import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from tapeless.data import bpe
from tapeless.data.bpe import CACHED_LENGTH, WORD, BpeTokenizer, train_bpe

TEXT = "The cat's mat, they'll say, isn't 12 or 345 feet\n\n  wide;\tit 'd be  seen -- \"so\" !!\r\nEnd.\n" * 20
ALPHABETS = {
    "ascii": [chr(i) for i in range(128)],
    "edges": list(" \n\t'sdmtrelv1a,"),
    "unicode": [*" \n'sa1,", "é", "漢", "🙂", "²", "Ⅷ", "٣", "\u0301", "\u00a0", "\u2028", "\u3000", "\x1c", "\x85", "ﬁ", "ʼ"],
}


@pytest.fixture(scope="module")
def tokenizer() -> BpeTokenizer:
    return train_bpe([TEXT], 330)


def by_package(tokenizer: BpeTokenizer, text: str) -> list[int]:
    return tokenizer.backend.encode(text, add_special_tokens=False).ids


def check_same(tokenizer: BpeTokenizer, texts: list[str]) -> None:
    found = tokenizer.encode_all(texts)
    assert len(found) == len(texts)
    for text, ids in zip(texts, found, strict=True):
        assert ids.dtype == np.int64
        assert ids.tolist() == by_package(tokenizer, text), text


@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_random_texts(tokenizer: BpeTokenizer, alphabet: str):
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(ALPHABETS[alphabet], size)) for size in rng.integers(0, 60, 2000)]
    check_same(tokenizer, texts)


def test_a_text_that_is_partly_beyond_ascii(tokenizer: BpeTokenizer):
    lines = TEXT.splitlines(keepends=True)
    mixed = "".join(line if i % 3 else f"\u201c{line.strip()}\u201d  \n \n" for i, line in enumerate(lines))
    assert {by_word for by_word, _ in tokenizer.word_cache._blocks(mixed)} == {True, False}
    check_same(tokenizer, [mixed, TEXT, "", mixed[::-1]])


def test_a_word_alone_is_one_word():
    rng = np.random.default_rng(1)
    for _ in range(3000):
        text = "".join(rng.choice(ALPHABETS["edges"], 30))
        found = WORD.findall(text)
        assert "".join(found) == text
        assert all(WORD.findall(word) == [word] for word in found)


def test_what_is_kept_is_bounded(tokenizer: BpeTokenizer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bpe, "CACHED_WORDS", 10)
    fresh = BpeTokenizer(tokenizer.spec)
    long = "a" * (CACHED_LENGTH + 1)
    for text in (TEXT, long, TEXT[::-1]):
        check_same(fresh, [text])
        assert 0 < len(fresh.word_cache) <= 10
        assert long not in fresh.word_cache


def with_added(tokenizer: BpeTokenizer, *contents: str, **flags: bool) -> BpeTokenizer:
    spec = json.loads(json.dumps(tokenizer.spec))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True} | flags
    spec["added_tokens"] += [
        {"id": tokenizer.vocab_size + i, "content": content, **plain} for i, content in enumerate(contents)
    ]
    return BpeTokenizer(spec)


@pytest.mark.parametrize("flags", [{}, {"special": False}, {"special": False, "single_word": True}], ids=str)
def test_added_tokens(tokenizer: BpeTokenizer, flags: dict[str, bool]):
    """Special ones are never found in a text."""
    more = with_added(tokenizer, "<|end|>", "cat", **flags)
    texts = ["a <|end|> b", "<|end|>", "no cats, concatenated", "the cat sat", "\n<|end|>\n", "none", "cat é <|end|>"]
    check_same(more, texts)
    assert (tokenizer.vocab_size in more.encode_all(["a <|end|> b"])[0]) == (not flags.get("special", True))
    assert "".join(map(more.decode, more.encode_all(texts))) == "".join(texts)


SPLIT = {"type": "Split", "pattern": {"Regex": "\\s"}, "behavior": "Isolated", "invert": False}
BYTE_LEVEL = {"type": "ByteLevel", "trim_offsets": True}
OTHERS: dict[str, dict[str, Any]] = {
    "a prefix space": {"pre_tokenizer": {**BYTE_LEVEL, "add_prefix_space": True, "use_regex": True}},
    "no pattern": {"pre_tokenizer": {**BYTE_LEVEL, "add_prefix_space": False, "use_regex": False}},
    "another pattern": {"pre_tokenizer": SPLIT},
    "a sequence": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT]}},
    "no cutting": {"pre_tokenizer": None},
    "a normalizer": {"normalizer": {"type": "Lowercase"}},
}


@pytest.mark.parametrize("change", OTHERS)
def test_other_tokenizers_are_left_to_the_package(tokenizer: BpeTokenizer, change: str):
    other = BpeTokenizer(tokenizer.spec | OTHERS[change])
    assert other.word_cache is None
    check_same(other, [TEXT, "", "é"])


def test_no_merge_is_left_out_by_chance(tokenizer: BpeTokenizer):
    """Or a text would have other ids at each reading, whatever the seed."""
    other = BpeTokenizer(tokenizer.spec | {"model": tokenizer.spec["model"] | {"dropout": 0.9}})
    text = "the quick brown fox jumps over the lazy dog\n" * 9
    for encode in (lambda t: t.encode(text), lambda t: t.encode_prompt(text), lambda t: t.encode_all([text])[0]):
        assert encode(other).tolist() == encode(tokenizer).tolist()
