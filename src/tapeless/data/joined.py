"""Several token files as one stream: the tokens of the second stand behind those of the first, and nothing is copied.

It is indexed as an array is, by one place, by a slice or by an array of places, and only what is asked for is read. A window
may lie across the border of two files. To make one array of it would read all into memory, so that is refused.
Tested by: tests/data/test_joined.py."""

from typing import Any, NoReturn

import numpy as np


class JoinedTokens:
    def __init__(self, parts: list[np.memmap]):  # (n_i,) each, of one type
        self.parts, self.dtype = parts, parts[0].dtype
        self.itemsize = self.dtype.itemsize
        self.ends = np.cumsum([len(part) for part in parts], dtype=np.int64)  # (s,)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, key: Any) -> Any:
        """An integer gives one id, a slice (n,) of them, an array of places an array of its shape."""
        if isinstance(key, slice):
            return self._between(*key.indices(len(self)))
        return self._gathered(np.asarray(key))[()]

    def _between(self, start: int, stop: int, step: int) -> np.ndarray:  # (n,)
        if step != 1:
            raise IndexError("a slice of several token files takes every token")
        begins = self.ends - [len(part) for part in self.parts]
        inside = [part[max(start - b, 0) : max(stop - b, 0)] for part, b in zip(self.parts, begins.tolist(), strict=True)]
        return np.concatenate(inside)

    def _gathered(self, places: np.ndarray) -> np.ndarray:  # (…) integers -> (…) ids
        if places.size and not (places.min() >= 0 and places.max() < len(self)):
            raise IndexError(f"places {places.min()} to {places.max()} of {len(self)} tokens")
        which = np.searchsorted(self.ends, places, side="right")  # (…) the file that each is in
        ids = np.empty(places.shape, self.dtype)
        for file in np.unique(which):
            here = which == file
            ids[here] = self.parts[file][places[here] - (self.ends[file - 1] if file else 0)]
        return ids

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"{len(self.parts)} token files are not made into one array; index them, or take a slice")


Tokens = np.ndarray | JoinedTokens


def joined(parts: list[np.memmap]) -> Tokens:
    return parts[0] if len(parts) == 1 else JoinedTokens(parts)


def as_plain(tokens: Tokens) -> Tokens:
    """A memory map as the array beneath it, which is quicker to index."""
    return tokens if isinstance(tokens, JoinedTokens) else np.asarray(tokens)
