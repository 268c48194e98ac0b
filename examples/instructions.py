"""Synthetic instructions of seven kinds, about lists of letters, for docs/tutorial_chat.md.

    python examples/instructions.py qa.jsonl test.jsonl
Writes 16000 conversations to train on and 20 to test with. No list of the test is in a training conversation, so a right answer
is not a memorized one."""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

LETTERS = "bcdfghjklmnpqrstvwxyz"
NUM_TRAIN, NUM_TEST = 16000, 20

# What a user says about a list of letters, and the answer.
KINDS: dict[str, Callable[[list[str]], tuple[str, str]]] = {
    "repeat": lambda x: (f"Repeat: {' '.join(x)}", " ".join(x)),
    "reverse": lambda x: (f"Reverse: {' '.join(x)}", " ".join(reversed(x))),
    "first": lambda x: (f"First of: {' '.join(x)}", x[0]),
    "last": lambda x: (f"Last of: {' '.join(x)}", x[-1]),
    "count": lambda x: (f"Count: {' '.join(x)}", str(len(x))),
    "capitals": lambda x: (f"Capitals: {' '.join(x)}", " ".join(x).upper()),
    "after": lambda x: (f"What follows {x[1]} in: {' '.join(x)}", x[2]),
}


def conversation(kind: str, letters: list[str]) -> dict[str, object]:
    question, answer = KINDS[kind](letters)
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def main(train: Path, test: Path) -> None:
    """The kinds in turn, each time about another list."""
    rng, kinds, lists = random.Random(0), list(KINDS), set[tuple[str, ...]]()
    while len(lists) < NUM_TRAIN + NUM_TEST:
        lists.add(tuple(rng.sample(LETTERS, rng.choice((3, 4, 4, 4)))))
    order = sorted(lists)
    rng.shuffle(order)
    rows = [conversation(kinds[i % len(kinds)], list(letters)) for i, letters in enumerate(order)]
    for path, part in ((test, rows[:NUM_TEST]), (train, rows[NUM_TEST:])):
        path.write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
