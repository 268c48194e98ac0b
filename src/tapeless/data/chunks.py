"""Documents are read in chunks of about a million characters, so that no text has to fit into memory.

A cut falls before a newline that follows a visible character. No match of GPT-2's split pattern spans such a place, so the ids
of the chunks are those of the whole text; another pattern may differ by a token at a cut. If no such newline comes for a long
time (some files are one line), the cut falls at any whitespace after a visible character, and without one, anywhere.
Tested by: tests/data/test_chunks.py."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

CHUNK = 1 << 20  # characters
MAX_CHUNKS = 4  # chunks' worth of text without a newline
LINE, WORD = re.compile(r"(?<=\S)\n"), re.compile(r"(?<=\S)\s")


class Chunk(NamedTuple):
    text: str
    last: bool  # of its document
    part: int = 0  # of the data set: 0 training, 1 validation


def chunk_text(blocks: Iterable[str]) -> Iterator[str]:
    """One text, which comes in blocks of any size, cut where a tokenizer would not notice."""
    held, searched = "", CHUNK
    for block in blocks:
        held += block
        while cut := _cut(held, searched):
            yield held[:cut]
            held, searched = held[cut:], CHUNK
        searched = max(searched, len(held) - 1)  # do not search the same text twice
    if held:
        yield held


def _cut(text: str, searched: int) -> int:  # 0: not yet
    found = LINE.search(text, searched)
    if found is None and len(text) > MAX_CHUNKS * CHUNK:
        found = WORD.search(text, CHUNK)
    if found is None:
        return MAX_CHUNKS * CHUNK if len(text) > MAX_CHUNKS * CHUNK else 0
    return found.start()


def document_chunks(blocks: Iterable[str]) -> Iterator[Chunk]:
    """The chunks of one document, the last one marked; a document without text has one, empty."""
    before = None
    for text in chunk_text(blocks):
        if before is not None:
            yield Chunk(before, False)
        before = text
    yield Chunk(before or "", True)
