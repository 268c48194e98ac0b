"""The first look at a source: how many documents it has, how long they are, and which of them are the same.

41 bytes are kept of each document, never its text; what is to be trained on, and what held out, is decided from them. A source
is read again for everything that follows; documents that have another length by then are an error.
Tested by: tests/data/test_survey.py."""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from tapeless.data.pieces import Piece, clipped
from tapeless.data.split import cut_of, held_out, unseen
from tapeless.errors import EMPTY_DATA, ONLY_WHITESPACE, DataError

Source = Callable[[], Iterator[Piece]]  # read from its beginning with each call


class Survey(NamedTuple):
    digests: np.ndarray  # (n, 32) uint8: SHA-256 of each document
    sizes: np.ndarray  # (n,) int64: characters
    blank: np.ndarray  # (n,) bool: nothing but whitespace, so that it is passed over

    @property
    def fingerprint(self) -> str:
        """Of the texts alone, wherever they lie."""
        return hashlib.sha256(self.digests[~self.blank].tobytes()).hexdigest()


def survey(stream: Iterable[Piece], name: str) -> Survey:
    digests, sizes, blank = bytearray(), array("q"), bytearray()
    digest, size, empty = hashlib.sha256(), 0, True
    for text, last in stream:
        digest.update(text.encode())
        size += len(text)
        empty = empty and not text.strip()
        if last:
            digests += digest.digest()
            sizes.append(size)
            blank.append(empty)
            digest, size, empty = hashlib.sha256(), 0, True
    found = Survey(
        np.frombuffer(digests, np.uint8).reshape(-1, 32), np.array(sizes, np.int64), np.frombuffer(blank, np.uint8).astype(bool)
    )
    if found.blank.all():
        raise (ONLY_WHITESPACE if len(found.blank) else EMPTY_DATA)(path=name)
    return found


class Part(NamedTuple):
    """The training or the validation part: which documents of a source, and which of their characters."""

    source: Source
    sizes: np.ndarray  # (n,) int64: characters of every document of the source
    wanted: np.ndarray  # (n,) bool
    start: int = 0
    stop: int | None = None

    @property
    def num_characters(self) -> int:
        return int(self.sizes[self.wanted].sum())

    def texts(self) -> Iterator[Piece]:
        """The text to tokenize. Every document but the last gets a newline where it does not end in one, and an empty line."""
        final, index = int(np.flatnonzero(self.wanted)[-1]), 0
        for text, last in clipped(self._unchanged(), self.start, self.stop):
            if self.wanted[index]:
                ending = ("\n" if text.endswith("\n") else "\n\n") if last and index != final else ""
                yield Piece(text + ending, last)
                if last and index == final:
                    return
            index += last

    def _unchanged(self) -> Iterator[Piece]:
        """The source once more, as long as it is what it was."""
        index = size = 0
        for text, last in self.source():
            size += len(text)
            if last:
                if index >= len(self.sizes) or size != self.sizes[index]:
                    raise DataError(f"document {index + 1} was altered while it was read; prepare the data again")
                index, size = index + 1, 0
            yield Piece(text, last)


def divided(source: Source, found: Survey) -> tuple[Part, Part]:  # training, validation
    """A source into two parts, by its contents alone (split.py)."""
    there = np.flatnonzero(~found.blank)  # (k,)
    mask = held_out(found.digests[there], found.sizes[there])
    wanted = [np.zeros(len(found.sizes), bool), np.zeros(len(found.sizes), bool)]
    if mask is None:  # copies of one text: each without its end, and the end once
        cut = cut_of(int(found.sizes[there[0]]))
        wanted[0][there] = True
        wanted[1][there[0]] = True
        return Part(source, found.sizes, wanted[0], 0, cut), Part(source, found.sizes, wanted[1], cut, None)
    wanted[0][there[~mask]] = True
    wanted[1][there[mask]] = True
    return Part(source, found.sizes, wanted[0]), Part(source, found.sizes, wanted[1])


def given(training: Source, found: Survey, validation: Source, held: Survey) -> tuple[Part, Part, int]:
    """Two sources as the two parts. A validation document that is trained on too, or a copy there, is dropped and counted."""
    fresh = ~held.blank & unseen(held.digests, found.digests)
    if not fresh.any():
        raise DataError("every validation document also stands in the training text; give others with --val-path")
    dropped = int((~held.blank).sum() - fresh.sum())
    return Part(training, found.sizes, ~found.blank), Part(validation, held.sizes, fresh), dropped
