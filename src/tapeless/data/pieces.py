"""Documents as they are read: in pieces of about a million characters, so that no text has to fit into memory.

Cuts fall before a newline behind a visible character. No match of GPT-2's split pattern goes across such a place, so the ids
of the pieces are those of the whole text; another pattern may differ by a token at a cut. Where no such newline comes for a
long time (some files are one line) any whitespace behind a visible character will do, and where there is none, any place.
Tested by: tests/data/test_pieces.py."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

PIECE = 1 << 20  # characters
PATIENCE = 4  # pieces' worth of text without a newline
LINE, WORD = re.compile(r"(?<=\S)\n"), re.compile(r"(?<=\S)\s")


class Piece(NamedTuple):
    text: str
    last: bool  # of its document


def pieces(chunks: Iterable[str]) -> Iterator[str]:
    """One text, which comes in chunks of any size, cut where a tokenizer would not notice."""
    held, searched = "", PIECE
    for chunk in chunks:
        held += chunk
        while cut := _cut(held, searched):
            yield held[:cut]
            held, searched = held[cut:], PIECE
        searched = max(searched, len(held) - 1)  # what was searched once without a find is not searched again
    if held:
        yield held


def _cut(text: str, searched: int) -> int:  # 0: not yet
    found = LINE.search(text, searched)
    if found is None and len(text) > PATIENCE * PIECE:
        found = WORD.search(text, PIECE)
    if found is None:
        return PATIENCE * PIECE if len(text) > PATIENCE * PIECE else 0
    return found.start()


def document(chunks: Iterable[str]) -> Iterator[Piece]:
    """The pieces of one document, the last one marked; of a document without text there is one, empty."""
    before = None
    for text in pieces(chunks):
        if before is not None:
            yield Piece(before, False)
        before = text
    yield Piece(before or "", True)


def clipped(
    stream: Iterable[Piece],
    start: int,
    stop: int | None,  # None: to the end
) -> Iterator[Piece]:
    """Characters start to stop of every document."""
    position = 0
    for text, last in stream:
        upto = None if stop is None else max(stop - position, 0)
        yield Piece(text[max(start - position, 0) : upto], last)
        position = 0 if last else position + len(text)
