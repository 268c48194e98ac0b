"""What is trained on and what is held out, decided on text, before any tokenizer sees it.

One document: the last tenth of its characters. Several: whole documents, walked in the order of their content's hash, are held
out as long as they fit into a tenth of all characters; where none fits, the shortest. So the names and the order of files do
not matter, copies of a text always stay on one side, and the held-out part is never empty and never everything.
Joining: every document but the last gets a newline where it does not end in one, and an empty line behind it.
Judged by: tests/data/test_split.py."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence

VALIDATION_SHARE = 10  # one part in ten


def split(texts: Sequence[str]) -> tuple[list[str], list[str]]:  # training, validation
    copies: dict[str, list[int]] = defaultdict(list)  # hash of the content -> which texts have it
    for i, text in enumerate(texts):
        copies[hashlib.sha256(text.encode()).hexdigest()].append(i)
    if len(copies) == 1:
        cut = len(texts[0]) * (VALIDATION_SHARE - 1) // VALIDATION_SHARE
        return [texts[0][:cut]] * len(texts), [texts[0][cut:]]
    sizes = {content: sum(len(texts[i]) for i in copies[content]) for content in sorted(copies)}
    room, held_out = sum(sizes.values()) // VALIDATION_SHARE, set()
    for content, size in sizes.items():
        if size <= room:
            room -= size
            held_out |= set(copies[content])
    if not held_out:
        held_out = set(copies[min(sizes, key=lambda content: sizes[content])])
    training = [text for i, text in enumerate(texts) if i not in held_out]
    return training, [texts[i] for i in sorted(held_out)]


def join(texts: Sequence[str]) -> str:
    ended = [text if text.endswith("\n") else text + "\n" for text in texts[:-1]]
    return "\n".join([*ended, *texts[-1:]])
