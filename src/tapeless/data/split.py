"""What is trained on and what is held out, decided on text, before any tokenizer sees it.

One document: the last tenth of its characters. Several: whole documents, walked in the order of their content's hash, are held
out as long as they fit into a tenth of all characters; where none fits, the shortest. So the names and the order of files do
not matter, copies of a text always stay on one side, and the held-out part is never empty and never everything.
Where the validation text is given by itself, what also stands in the training text is dropped from it, and so are copies.
Tested by: tests/data/test_split.py."""

import numpy as np

VALIDATION_SHARE = 10  # one part in ten


def held_out(
    digests: np.ndarray,  # (n, 32) uint8: the hash of each document
    sizes: np.ndarray,  # (n,) int64: its characters
) -> np.ndarray | None:  # (n,) bool
    """Which documents are validated on; None where all are copies of one text, which is to be cut."""
    order, first = _groups(digests)  # copies side by side, in the order of their hash
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


def cut_of(size: int) -> int:
    """Where the held-out end of a single document begins."""
    return size * (VALIDATION_SHARE - 1) // VALIDATION_SHARE


def unseen(
    validation: np.ndarray,  # (m, 32) uint8
    training: np.ndarray,  # (n, 32) uint8
) -> np.ndarray:  # (m,) bool
    """Which validation documents do not stand in the training text, nor earlier among themselves."""
    places: dict[bytes, int] = {}
    for i, digest in enumerate(validation):
        places.setdefault(digest.tobytes(), i)
    for digest in training:
        places.pop(digest.tobytes(), None)
    mask = np.zeros(len(validation), bool)
    mask[list(places.values())] = True
    return mask


def num_copies(digests: np.ndarray) -> int:  # (n, 32) uint8
    """Documents whose text another one has already."""
    return len(digests) - len(_groups(digests)[1]) if len(digests) else 0


def _groups(digests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # (n,), (g,) int64
    """An order in which equal hashes are neighbours, ascending, and where in it each group of equal ones begins."""
    words = np.ascontiguousarray(digests).view(">u8")  # (n, 4): sorted as numbers as their bytes are
    order = np.lexsort(words.T[::-1])
    differs = (np.diff(words[order], axis=0) != 0).any(1)
    return order, np.flatnonzero(np.concatenate([[True], differs]))
