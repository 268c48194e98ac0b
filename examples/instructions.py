"""A small set of synthetic instructions: seven kinds, about made-up words and two-digit numbers.

    python examples/instructions.py train.jsonl test.jsonl
Writes 6000 conversations to train on and 20 to test with. No word and no pair of numbers of the test occurs in the training
conversations, so a right answer is not a memorized one."""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
NUM_TRAIN, NUM_TEST = 6000, 20


def word(rng: random.Random) -> str:
    return "".join(rng.choice(letters) for letters in (CONSONANTS, VOWELS) * rng.choice((2, 3)))


# By name: what a user says about the words a, b, c and the answer.
KINDS: dict[str, Callable[[str, str, str], tuple[str, str]]] = {
    "say": lambda a, b, c: (f"Say {a}.", a),
    "twice": lambda a, b, c: (f"Say {a} twice.", f"{a} {a}"),
    "first": lambda a, b, c: (f"Which word is first: {a}, {b}, {c}?", a),
    "last": lambda a, b, c: (f"Which word is last: {a}, {b}, {c}?", c),
    "swap": lambda a, b, c: (f"Swap {a} and {b}.", f"{b} {a}"),
    "capitals": lambda a, b, c: (f"Write {a} in capitals.", a.upper()),
}


def conversation(kind: str, question: str, answer: str) -> dict[str, object]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"kind": kind, "messages": messages}


def conversations(rng: random.Random, count: int, words: list[str], pairs: list[tuple[int, int]]) -> list[dict[str, object]]:
    """The kinds in turn, each with arguments of its own."""
    made = []
    for i in range(count):
        kind = [*KINDS, "larger"][i % (len(KINDS) + 1)]
        if kind == "larger":
            m, n = rng.choice(pairs)
            made.append(conversation(kind, f"Which is larger, {m} or {n}?", str(max(m, n))))
        else:
            made.append(conversation(kind, *KINDS[kind](*rng.sample(words, 3))))
    return made


def main(train: Path, test: Path) -> None:
    rng = random.Random(0)
    words = sorted({word(rng) for _ in range(4000)})
    pairs = [(m, n) for m in range(10, 100) for n in range(10, 100) if m != n]
    rng.shuffle(words)
    rng.shuffle(pairs)
    for path, rows in (
        (train, conversations(rng, NUM_TRAIN, words[200:], pairs[200:])),
        (test, conversations(rng, NUM_TEST, words[:200], pairs[:200])),
    ):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
