"""Instruction data: JSONL of prompts with the completions to learn, each example a window of its own.

    {"prompt": "2 + 2 =", "completion": " 4"}
    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
Messages are concatenated as `role: content`. Only completions and the assistant's messages count in the loss, each followed by
an end: the model's end-of-text token, or a newline if it has none. All other tokens, and padding, have the target -100.
A second token file (*.roles.bin) next to train.bin and val.bin says of each token whether it counts in the loss (1) and whether
it is the first of an example (2). An example longer than a window is truncated; one whose prompt alone fills the window is left
out, since nothing of it would count. One example in ten is held out, by the hash of its content.
Tested by: tests/data/test_instructions.py."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tapeless.data.columns import is_dataset
from tapeless.data.files import canonical_json
from tapeless.data.read import JSONL, find_files, read_records, suffix_of
from tapeless.data.token_files import write_tokens
from tapeless.data.tokenizer import Tokenizer
from tapeless.errors import DataError

COUNTS, BEGINS = 1, 2  # bits of a role
ROLES = 4
HELD_OUT = 10  # one example in ten
ASSISTANT = "assistant"


class Segment(NamedTuple):
    text: str
    counts: bool


Example = list[Segment]


def holds_examples(path: str, text_field: str) -> bool:
    """Whether a source is instructions: JSONL files whose first record has a prompt or messages, and no text."""
    if is_dataset(path):
        return False
    files = find_files(path)
    if any(suffix_of(file) not in JSONL for file in files):
        return False
    try:
        record = next((record for file in files for _, record in read_records(file, "prompt")), None)
    except DataError:  # reading the file reports it
        return False
    if not isinstance(record, dict) or text_field in record:
        return False
    return bool(record.keys() & {"prompt", "completion", "messages"})


def read_examples(path: str) -> list[Example]:
    return [
        _example(record, f"{file}:{number}") for file in find_files(path) for number, record in read_records(file, "prompt")
    ]


def _example(record: Any, where: str) -> Example:
    if isinstance(record, dict) and {"prompt", "completion"} <= record.keys():
        prompt, completion = (_text(record[name], f"{where}: `{name}`") for name in ("prompt", "completion"))
        return [Segment(prompt, False), Segment(completion, True)]
    if not isinstance(record, dict) or not isinstance(record.get("messages"), list) or not record["messages"]:
        raise DataError(f"{where}: expected an object with `prompt` and `completion`, or with a list of `messages`")
    example: Example = []
    for i, message in enumerate(record["messages"]):
        place = f"{where}: message {i + 1}"
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise DataError(f"{place}: expected an object with `role` and `content`")
        role, content = (_text(message[name], f"{place}: `{name}`") for name in ("role", "content"))
        said = role == ASSISTANT
        example += [Segment(f"{role}: ", False), Segment(content if said else f"{content}\n", said)]
    if not any(segment.counts for segment in example):
        raise DataError(f"{where}: no message has the role {ASSISTANT!r}, so nothing would be learned from it")
    return example


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{what} must be a string, got {type(value).__name__}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise DataError(f"{what} holds half of a surrogate pair, which is not a character; remove it")
    return value


def split_examples(examples: Sequence[Example]) -> tuple[list[Example], list[Example]]:  # training, validation
    """Copies of an example are in the same part, and the order of the file does not matter."""
    by_hash = {content_hash(example): example for example in examples}
    if len(by_hash) < 2:
        raise DataError("instructions need two different examples at least: one to train on, one to hold out")
    held_out = set(sorted(by_hash)[: max(1, len(by_hash) // HELD_OUT)])
    training = [example for example in examples if content_hash(example) not in held_out]
    return training, [by_hash[content] for content in sorted(held_out)]


def content_hash(example: Example) -> str:
    return hashlib.sha256(canonical_json(example)).hexdigest()


def hash_of_examples(examples: Sequence[Example]) -> str:
    """Of all of them, in their order."""
    return hashlib.sha256(" ".join(map(content_hash, examples)).encode()).hexdigest()


def texts_of(examples: Iterable[Example]) -> Iterator[str]:
    """The text that a tokenizer is trained on."""
    return ("".join(segment.text for segment in example) for example in examples)


def write_examples(
    folder: Path, part: str, examples: Iterable[Example], tokenizer: Tokenizer, end: Sequence[int]
) -> tuple[int, int]:
    """Write the tokens of one part and their roles. Returns the bytes and the tokens that count in the loss."""
    ids: list[np.ndarray] = []
    roles: list[np.ndarray] = []
    counted = 0
    for example in examples:
        for i, (text, counts) in enumerate(example):
            found = tokenizer.encode_prompt(text) if i == 0 else tokenizer.encode(text)
            if counts:
                found = np.concatenate([found, end or tokenizer.encode("\n")])
                counted += len(text.encode())
            role = np.full(len(found), COUNTS if counts else 0)
            if i == 0:
                role[:1] |= BEGINS
            ids.append(found)
            roles.append(role)
    for name, chunks, size in ((part, ids, tokenizer.vocab_size), (f"{part}.roles", roles, ROLES)):
        write_tokens(folder / f"{name}.bin", chunks, vocab_size=size, fingerprint=tokenizer.fingerprint)
    return counted, sum(int((role & COUNTS).sum()) for role in roles)
