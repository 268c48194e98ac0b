"""The training and validation parts of a source, decided on its text before any tokenizer sees it.

A first pass over a source indexes its documents: 41 bytes each (hash, length, blank or not), never the text. A second pass
yields the text of both parts; a document whose length differs by then is an error.
One document: the last tenth of its characters is held out. Several: whole documents, in the order of their content's hash, are
held out if they still fit into a tenth of all characters; if none fits, the shortest. So names and order of files do not
matter, copies of a text are always in the same part, and the validation part is never empty and never everything.
If the validation text is a separate source, documents that are also in the training text, and copies, are dropped from it.
Tested by: tests/data/test_split.py."""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from tapeless.data.chunks import Chunk
from tapeless.errors import EMPTY_DATA, ONLY_WHITESPACE, DataError

VALIDATION_SHARE = 10  # one part in ten
TRAIN, VAL = 0, 1

DocumentSource = Callable[[], Iterator[Chunk]]  # every call reads from the beginning


class DocumentIndex(NamedTuple):
    digests: np.ndarray  # (n, 32) uint8: SHA-256 of each document
    sizes: np.ndarray  # (n,) int64: characters
    blank: np.ndarray  # (n,) bool: nothing but whitespace, so it is skipped

    @property
    def fingerprint(self) -> str:
        """Of the texts alone, wherever they are stored."""
        return hashlib.sha256(self.digests[~self.blank].tobytes()).hexdigest()


def index_documents(chunks: Iterable[Chunk], name: str) -> DocumentIndex:
    digests, sizes, blank = bytearray(), array("q"), bytearray()
    digest, size, empty = hashlib.sha256(), 0, True
    for text, last, _ in chunks:
        digest.update(text.encode())
        size += len(text)
        empty = empty and not text.strip()
        if last:
            digests += digest.digest()
            sizes.append(size)
            blank.append(empty)
            digest, size, empty = hashlib.sha256(), 0, True
    index = DocumentIndex(
        np.frombuffer(digests, np.uint8).reshape(-1, 32), np.array(sizes, np.int64), np.frombuffer(blank, np.uint8).astype(bool)
    )
    if index.blank.all():
        raise (ONLY_WHITESPACE if len(index.blank) else EMPTY_DATA)(path=name)
    return index


class Selection(NamedTuple):
    """Which documents of a source are in which part."""

    source: DocumentSource
    sizes: np.ndarray  # (n,) int64: characters of every document
    train: np.ndarray  # (n,) bool
    val: np.ndarray  # (n,) bool
    cut: int | None = None  # training documents end, and validation documents begin, at this character

    def num_characters(self, part: int) -> int:
        return int(self.sizes[self.val if part == VAL else self.train].sum())

    def chunks(self, *, separated: bool) -> Iterator[Chunk]:
        """The text to tokenize, in one pass. separated: every document but the last of its part gets a newline if it does not
        end in one, and an empty line."""
        parts = [(TRAIN, self.train, 0, self.cut), (VAL, self.val, self.cut or 0, None)]
        final = [int(np.flatnonzero(wanted)[-1]) if wanted.any() else -1 for _, wanted, _, _ in parts]
        index = position = 0
        for text, last, _ in self._unchanged():
            for part, wanted, start, stop in parts:
                if wanted[index]:
                    clipped = text[max(start - position, 0) : None if stop is None else max(stop - position, 0)]
                    if separated and last and index != final[part]:
                        clipped += "\n" if clipped.endswith("\n") else "\n\n"
                    yield Chunk(clipped, last, part)
            if last and index == max(final):
                return
            index, position = index + last, 0 if last else position + len(text)

    def _unchanged(self) -> Iterator[Chunk]:
        """The source again; an error if it is not what was indexed."""
        index = size = 0
        for chunk in self.source():
            size += len(chunk.text)
            if chunk.last:
                if index >= len(self.sizes) or size != self.sizes[index]:
                    raise DataError(f"document {index + 1} was altered while it was read; prepare the data again")
                index, size = index + 1, 0
            yield chunk


def split_source(source: DocumentSource, index: DocumentIndex) -> Selection:
    """Both parts from one source, by its contents alone."""
    there = np.flatnonzero(~index.blank)  # (k,)
    mask, cut = held_out(index.digests[there], index.sizes[there]), None
    train, val = np.zeros((2, len(index.sizes)), bool)
    if mask is None:  # copies of one text: train on each without its end, validate on the end once
        cut = int(index.sizes[there[0]]) * (VALIDATION_SHARE - 1) // VALIDATION_SHARE
        train[there] = val[there[0]] = True
    else:
        train[there[~mask]] = val[there[mask]] = True
    return Selection(source, index.sizes, train, val, cut)


def all_documents(source: DocumentSource, index: DocumentIndex, part: int, wanted: np.ndarray | None = None) -> Selection:
    """All documents of a source, or the wanted ones (n,), as one part."""
    wanted, none = ~index.blank if wanted is None else wanted, np.zeros(len(index.sizes), bool)
    return Selection(source, index.sizes, none if part == VAL else wanted, wanted if part == VAL else none)


def unseen_documents(train: DocumentIndex, val: DocumentIndex) -> tuple[np.ndarray, int]:  # (m,) bool
    """The validation documents that are neither in the training text nor copies of an earlier one, and how many are dropped."""
    first: dict[bytes, int] = {}
    for i, digest in enumerate(val.digests):
        first.setdefault(digest.tobytes(), i)
    for digest in train.digests:
        first.pop(digest.tobytes(), None)
    wanted = np.zeros(len(val.sizes), bool)
    wanted[list(first.values())] = True
    wanted &= ~val.blank
    if not wanted.any():
        raise DataError("every validation document is also in the training text; give others with --val-path")
    return wanted, int((~val.blank).sum() - wanted.sum())


def held_out(
    digests: np.ndarray,  # (n, 32) uint8: the hash of each document
    sizes: np.ndarray,  # (n,) int64: its characters
) -> np.ndarray | None:  # (n,) bool
    """Which documents are held out; None if all are copies of one text, which is cut instead."""
    order, first = _groups(digests)  # copies adjacent, in the order of their hash
    if len(first) == 1:
        return None
    group_sizes = np.add.reduceat(sizes[order], first)  # (g,)
    room, chosen = int(sizes.sum()) // VALIDATION_SHARE, np.zeros(len(first), bool)
    for group, size in enumerate(group_sizes.tolist()):
        if size <= room:
            room -= size
            chosen[group] = True
    if not chosen.any():
        chosen[group_sizes.argmin()] = True
    mask = np.zeros(len(sizes), bool)
    mask[order] = np.repeat(chosen, np.diff(first, append=len(sizes)))
    return mask


def num_copies(digests: np.ndarray) -> int:  # (n, 32) uint8
    """Documents that repeat the text of another."""
    return len(digests) - len(_groups(digests)[1]) if len(digests) else 0


def _groups(digests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # (n,), (g,) int64
    """An ascending order of the hashes, and where in it each group of equal ones begins."""
    words = np.ascontiguousarray(digests).view(">u8")  # (n, 4): sorted as numbers as their bytes are
    order = np.lexsort(words.T[::-1])
    differs = (np.diff(words[order], axis=0) != 0).any(1)
    return order, np.flatnonzero(np.concatenate([[True], differs]))
