"""Instruction data: JSONL, or a JSON list, of prompts with the completions to learn, each example a window of its own.

    {"prompt": "2 + 2 =", "completion": " 4"}
    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}               ShareGPT
    {"instruction": "Add the numbers.", "input": "2 and 2", "output": "4"}                                 Alpaca
A prompt and its completion are concatenated. All others are conversations, which a chat format (chat.py) makes into text. Only
completions and the assistant's messages count in the loss, each with its end: that of the chat format, the model's end of text,
or a newline if it has none. All other tokens, and padding, have the target -100.
A second token file (*.roles.bin) next to train.bin and val.bin says of each token whether it counts in the loss (1) and whether
it is the first of an example (2). An example longer than a window is truncated; one whose prompt alone fills the window is left
out, since nothing of it would count. One example in ten is held out, by the hash of its content.
Tested by: tests/data/test_instructions.py."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tapeless.data.chat import ASSISTANT, ChatFormat, Message, Turn
from tapeless.data.columns import is_dataset
from tapeless.data.files import canonical_json
from tapeless.data.read import JSONL, LIST, find_files, first_object, read_records, suffix_of
from tapeless.data.token_files import write_tokens
from tapeless.errors import DataError

COUNTS, BEGINS = 1, 2  # bits of a role
ROLES = 4
HELD_OUT = 10  # one example in ten
FORMATS = {"prompt": "completion", "messages": "", "conversations": "", "instruction": "output"}  # by the fields they have
SHAREGPT = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bing": ASSISTANT, "bard": ASSISTANT}  # roles as above


class Pair(NamedTuple):
    prompt: str
    completion: str


Example = Pair | list[Message]


def holds_examples(path: str, text_field: str) -> bool:
    """Whether a source is instructions: JSONL files and JSON lists, of which the first record has fields of FORMATS, and no
    text."""
    if is_dataset(path):
        return False
    files = find_files(path)
    try:
        if not all(suffix_of(file) in JSONL or first_object(file) for file in files):
            return False
        record = next(chain.from_iterable(map(_first_records, files)), None)
    except DataError:  # reading the file reports it
        return False
    if not isinstance(record, dict) or text_field in record:
        return False
    return bool(record.keys() & (FORMATS.keys() | {"completion"}))


def _first_records(file: Path) -> Iterator[Any]:
    """At least one, if the file has any. A damaged list is still one of examples, which reading it reports."""
    return iter([first_object(file)]) if suffix_of(file) == LIST else (record for _, record in read_records(file, "prompt"))


def read_examples(path: str) -> list[Example]:
    return [
        _example(record, f"{file}:{number}") for file in find_files(path) for number, record in read_records(file, "prompt")
    ]


def has_conversations(examples: Sequence[Example]) -> bool:
    return not all(isinstance(example, Pair) for example in examples)


def describe(examples: Sequence[Example]) -> str:
    """How many of them, and of which kind."""
    kinds = Counter("prompts with completions" if isinstance(example, Pair) else "conversations" for example in examples)
    return " and ".join(f"{count:,} {kind}" for kind, count in kinds.items())


def _example(record: Any, where: str) -> Example:
    fields = record if isinstance(record, dict) else {}
    kind = next((kind for kind, other in FORMATS.items() if kind in fields and (not other or other in fields)), None)
    if kind == "prompt":
        return Pair(*(_text(record[name], f"{where}: `{name}`") for name in Pair._fields))
    if kind == "instruction":
        fields = {**record, "input": record.get("input") or ""}
        asked, given, said = (_text(fields[name], f"{where}: `{name}`") for name in ("instruction", "input", "output"))
        return [Message("user", f"{asked}\n\n{given}" if given else asked), Message(ASSISTANT, said)]
    if kind is None or not isinstance(record[kind], list) or not record[kind]:
        raise DataError(
            f"{where}: expected an object with `prompt` and `completion`, with `instruction` and `output`, or with a list of "
            "`messages` or `conversations`"
        )
    messages = [_message(message, f"{where}: message {i}") for i, message in enumerate(record[kind], 1)]
    if not any(message.role == ASSISTANT for message in messages):
        raise DataError(f"{where}: no message has the role {ASSISTANT!r}, so nothing would be learned from it")
    return messages


def _message(message: Any, where: str) -> Message:
    found = message if isinstance(message, dict) else {}
    names = next((pair for pair in (("role", "content"), ("from", "value")) if set(pair) <= found.keys()), None)
    if names is None:
        raise DataError(f"{where}: expected an object with `role` and `content`, or `from` and `value`")
    role, content = (_text(found[name], f"{where}: `{name}`") for name in names)
    role = SHAREGPT.get(role, role) if names[0] == "from" else role
    if not re.fullmatch(r"\w+", role):
        raise DataError(f"{where}: `{names[0]}` {role!r:.40} is not a role such as system, user or {ASSISTANT}")
    return Message(role, content)


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
    parts = [(example.prompt, False), (example.completion, True)] if isinstance(example, Pair) else example
    return hashlib.sha256(canonical_json(parts)).hexdigest()


def hash_of_examples(examples: Sequence[Example]) -> str:
    """Of all of them, in their order."""
    return hashlib.sha256(" ".join(map(content_hash, examples)).encode()).hexdigest()


def texts_of(examples: Iterable[Example]) -> Iterator[str]:
    """The text that a tokenizer is trained on."""
    for example in examples:
        if isinstance(example, Pair):
            yield example.prompt + example.completion
        else:
            yield "".join(f"{message.role}: {message.content}\n" for message in example)


def write_examples(folder: Path, part: str, examples: Iterable[Example], chat: ChatFormat) -> tuple[int, int]:
    """Write the tokens of one part and their roles. Returns the bytes and the tokens that count in the loss."""
    ids: list[np.ndarray] = []
    roles: list[np.ndarray] = []
    counted = 0
    for example in examples:
        for i, (found, counts) in enumerate(_turns(example, chat)):
            role = np.full(len(found), COUNTS if counts else 0)
            if i == 0:
                role[:1] |= BEGINS
            ids.append(found)
            roles.append(role)
        answers = [example.completion] if isinstance(example, Pair) else [m.content for m in example if m.role == ASSISTANT]
        counted += sum(len(answer.encode()) for answer in answers)
    tokenizer = chat.tokenizer
    for name, chunks, size in ((part, ids, tokenizer.vocab_size), (f"{part}.roles", roles, ROLES)):
        write_tokens(folder / f"{name}.bin", chunks, vocab_size=size, fingerprint=tokenizer.fingerprint)
    return counted, sum(int((role & COUNTS).sum()) for role in roles)


def _turns(example: Example, chat: ChatFormat) -> list[Turn]:
    if not isinstance(example, Pair):
        return chat.turns(example)
    said = np.append(chat.tokenizer.encode(example.completion), chat.text_end)
    return [Turn(chat.tokenizer.encode_prompt(example.prompt), False), Turn(said, True)]
