"""Text to ids word by word, for tokenizers that cut text as GPT-2's does: a word's ids are kept, since most words come again.

The package cuts, looks up and merges 4 MB in a second on one core; Python's own pattern and a dictionary do it eight times as
fast. A word is cut no further when it stands alone, so that the package's answer for it holds wherever it stands.
What letters and digits are beyond ASCII is a matter of Unicode's version, and added tokens have rules of their own: lines and
texts with any of those are left to the package.
Tested by: tests/data/test_words.py."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

WORD = re.compile(r"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII)
LINE = re.compile(r"(?<=\S)(?=\n)")  # no word goes across the end of a line behind a visible character
MOST, LONGEST = 1 << 16, 64  # words that are kept, and characters of one: about 9 MB with words of 12


def cuts_as_gpt2(spec: dict[str, Any]) -> bool:
    """Whether the words of a tokenizer.json are GPT-2's."""
    before = spec.get("pre_tokenizer") or {}
    return before.get("type") == "ByteLevel" and before.get("use_regex", True) and not before.get("add_prefix_space")


def repeats_itself(spec: dict[str, Any]) -> bool:
    """Whether the ids of a word depend on nothing but the word."""
    return not spec.get("normalizer") and not spec["model"].get("dropout")


def ids_of(encoding: Any) -> np.ndarray:  # (n,) int64
    return np.array(encoding.ids, np.int64)


def by_package(backend: Any, texts: Sequence[str]) -> list[Any]:  # tokenizers.Encoding
    return backend.encode_batch_fast(list(texts), add_special_tokens=False)  # without the places in the text


class Words(dict[str, bytes]):
    """Of each word its ids, as 32-bit integers one behind another."""

    def __init__(self, backend: Any):  # tokenizers.Tokenizer
        super().__init__()
        self.backend = backend
        self.added = [token.content for token in backend.get_added_tokens_decoder().values()]
        self.starts = {token[:1] for token in self.added}

    def __missing__(self, word: str) -> bytes:
        found = ids_of(*by_package(self.backend, [word])).astype(np.uint32).tobytes()
        if len(word) <= LONGEST:
            if len(self) >= MOST:
                self.clear()  # rather than to stay with the words of what was read first
            self[word] = found
        return found

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:  # (n,) int64 each
        cut = [list(self._blocks(text)) for text in texts]
        rest = [block for blocks in cut for by_word, block in blocks if not by_word]
        answers = iter(by_package(self.backend, rest))
        return [np.concatenate([self._ids(block) if by_word else ids_of(next(answers)) for by_word, block in of]) for of in cut]

    def _blocks(self, text: str) -> Iterator[tuple[bool, str]]:
        """A text in parts, with whether each goes word by word."""
        if any(start in text for start in self.starts) and any(token in text for token in self.added):
            yield False, text
        elif text.isascii():
            yield True, text
        else:
            for by_word, lines in groupby(LINE.split(text), str.isascii):
                yield by_word, "".join(lines)

    def _ids(self, block: str) -> np.ndarray:  # (n,) int64
        return np.frombuffer(b"".join(map(self.__getitem__, WORD.findall(block))), np.uint32).astype(np.int64)
