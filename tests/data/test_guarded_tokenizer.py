"""Tokenizers of unknown origin: whatever the package does with them is one line of error, and those of others still work."""

import copy
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from tapeless.data import bpe
from tapeless.data.bpe import BpeTokenizer, GuardedTokenizer, is_plain, train_bpe
from tapeless.data.tokenizer import tokenizer_of
from tapeless.data.worker import Limits
from tapeless.errors import DataError

TEXT = "the quick brown fox jumps over the lazy dog, and sleeps. "


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    return train_bpe([TEXT * 20], 290).spec


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bpe, "Limits", lambda: Limits(1.0, 1 << 30))


def replaced(*pairs: tuple[str, str]) -> dict[str, Any]:
    steps = [{"type": "Replace", "pattern": {"String": a}, "content": b} for a, b in pairs]
    return {"type": "Sequence", "normalizers": steps}


def split_by(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, byte_level]}


def test_those_trained_here_need_no_process(spec: dict[str, Any]):
    assert is_plain(spec)
    assert type(tokenizer_of(spec, "here")) is BpeTokenizer


def test_others_are_the_same_in_their_process(spec: dict[str, Any]):
    other = spec | {"pre_tokenizer": split_by(r"\p{N}{1,3}|[^\s]+|\s+"), "normalizer": replaced(("q", "Q"))}
    inside, outside = BpeTokenizer(other), tokenizer_of(other, "there")
    assert type(outside) is GuardedTokenizer
    assert (outside.table, outside.special, outside.fingerprint) == (inside.table, inside.special, inside.fingerprint)
    for text in (TEXT, "", "é漢 12345"):
        np.testing.assert_array_equal(outside.encode(text), inside.encode(text))
        np.testing.assert_array_equal(outside.encode_prompt(text), inside.encode_prompt(text))
        assert outside.decode(inside.encode(text)) == inside.decode(inside.encode(text))
    assert [ids.tolist() for ids in outside.encode_all(["a b", "c"])] == [
        ids.tolist() for ids in inside.encode_all(["a b", "c"])
    ]


def test_a_stream_of_one_without_bytes(spec: dict[str, Any]):
    other = spec | {
        "decoder": {"type": "Sequence", "decoders": [spec["decoder"], {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    }
    inside, outside = BpeTokenizer(other), tokenizer_of(other, "there")
    ids = inside.encode(TEXT)
    streams = outside.stream(), inside.stream()
    pieces = [[stream.push(int(i)) for i in ids] for stream in streams]
    assert pieces[0] == pieces[1]
    assert "".join(pieces[0]).strip()


CASES = {
    "backtracks": ({"pre_tokenizer": split_by("(a|aa|aaa)+$")}, "took more than|PanicException|cannot load|Exception"),
    "explodes": ({"normalizer": replaced(*[("a", "a" * 64)] * 8)}, "GiB of memory|took more|capacity"),
    "empty pattern": (
        {"normalizer": replaced(("", "a" * 1000), ("", "b" * 1000), ("", "c" * 1000))},
        "GiB of memory|took more|Panic",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_of_error(spec: dict[str, Any], case: str):
    change, says = CASES[case]
    hostile = tokenizer_of(copy.deepcopy(spec) | change, "hostile.json")
    with pytest.raises(DataError, match=f"the tokenizer hostile.json.*({says})"):
        hostile.encode("a" * 40 + "b")
    with pytest.raises(DataError, match=r"the tokenizer hostile\.json"):  # and not only once
        hostile.encode("a" * 40 + "b")


def test_a_decoder_that_multiplies(spec: dict[str, Any]):
    decoder = {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 64}] * 9}
    hostile = tokenizer_of(spec | {"decoder": decoder}, "hostile.json")
    with pytest.raises(DataError, match=r"the tokenizer hostile\.json"):
        hostile.decode([spec["model"]["vocab"]["a"]])
