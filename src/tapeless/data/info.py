"""What `tapeless data info`, `tapeless data sample` and `tapeless tokenizer info` print, as plain values.

Tested by: tests/data/test_data_info.py."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tapeless.data.chunks import Chunk
from tapeless.data.external import open_external, read_header, token_files
from tapeless.data.instructions import hash_of_examples, holds_examples, read_examples, texts_of
from tapeless.data.prepare import Dataset, open_prepared, read_record
from tapeless.data.read import read_chunks
from tapeless.data.rng import draws, key
from tapeless.data.split import index_documents, num_copies
from tapeless.data.token_files import Tokens
from tapeless.data.tokenizer import CharTokenizer, Tokenizer
from tapeless.data.verification import scan_file


def data_info(path: Path, field: str) -> dict[str, Any]:
    """Of prepared data, which is verified in full, of external token files, of instructions, or of text."""
    if (path / "data.json").is_file():
        return prepared_info(open_prepared(path, full=True), path)
    if path.suffix == ".bin" and path.is_file():
        kind, count = read_header(path)
        return {"format": kind, "tokens": count, "largest_id": _largest_id(path)}
    if files := token_files(path):
        counts = {part: [read_header(file)[1] for file in of_part] for part, of_part in files.items()}
        return {
            "format": read_header(files["train"][0])[0],
            "training_files": len(files["train"]),
            "training_tokens": sum(counts["train"]),
            "validation_files": len(files["val"]),
            "validation_tokens": sum(counts["val"]),
            "largest_id": max(_largest_id(file) for of_part in files.values() for file in of_part),
        }
    if holds_examples(str(path), field):
        examples = read_examples(str(path))
        sizes = np.array([len(text) for text in texts_of(examples)])  # (n,)
        facts = {"examples": len(examples), "characters": int(sizes.sum()), **_lengths("characters_per_example", sizes)}
        return {**facts, "sha256": hash_of_examples(examples)}
    index = index_documents(read_chunks(str(path), field), str(path))
    digests, sizes = index.digests[~index.blank], index.sizes[~index.blank]
    return {
        "documents": len(sizes),
        "characters": int(sizes.sum()),
        **_lengths("characters_per_document", sizes),
        "copies": num_copies(digests),
        "without_text": int(index.blank.sum()),
        "sha256": index.fingerprint,
    }


def _largest_id(path: Path) -> int:
    return scan_file(path, open_external(path)).max_id


def prepared_info(data: Dataset, path: Path) -> dict[str, Any]:
    record = read_record(path)
    facts: dict[str, Any] = {
        "source": data.source,
        "documents": data.num_documents,
        "copies": record.get("num_copies"),
        "validation_documents_dropped": record.get("val_dropped"),
        "training_tokens": len(data.train),
        "validation_tokens": len(data.val),
        "bytes_per_token": round(data.bytes_per_token, 4),
        "bytes_of_an_id": data.train.itemsize,
        "tokenizer": data.tokenizer.kind,
        "vocab_size": data.tokenizer.vocab_size,
        "tokenizer_hash": data.tokenizer.fingerprint,
        "fingerprint": data.fingerprint,
    }
    if data.train_starts is not None:
        facts |= _lengths("tokens_per_document", np.diff(data.train_starts, append=len(data.train)))
    return {name: value for name, value in facts.items() if value is not None}


def _lengths(name: str, sizes: np.ndarray) -> dict[str, list[int]]:  # (n,)
    """Shortest, median, longest."""
    return {name: [int(sizes.min()), int(np.median(sizes)), int(sizes.max())]}


def tokenizer_info(tokenizer: Tokenizer) -> dict[str, Any]:
    lengths = [len(value) for value in tokenizer.table]
    added = [token["content"] for token in tokenizer.spec.get("added_tokens") or []]
    return {
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "hash": tokenizer.fingerprint,
        "mean_bytes_of_an_id": round(sum(lengths) / len(lengths), 3),
        "longest": tokenizer.decode([int(np.argmax(lengths))]),
        "special": added,
    }


def text_info(tokenizer: Tokenizer, chunks: Iterable[Chunk]) -> dict[str, Any]:
    """A tokenizer on a text: bytes per token, whether it decodes to the same text, and how much it has no id for."""
    tokens = num_bytes = characters = unknown = 0
    used, same = np.zeros(tokenizer.vocab_size, bool), True
    unknown_id = _unknown_id(tokenizer)
    for text, *_ in chunks:
        characters += len(text)
        num_bytes += len(text.encode())
        if isinstance(tokenizer, CharTokenizer):  # raises on unknown characters: count and skip them
            known = "".join(character for character in text if character in tokenizer.known)
            unknown += len(text) - len(known)
            ids = tokenizer.encode(known)
        else:
            ids = tokenizer.encode(text)
            unknown += int((ids == unknown_id).sum())
        tokens += len(ids)
        used[ids] = True
        same = same and tokenizer.decode(ids) == text
    return {
        "characters": characters,
        "bytes": num_bytes,
        "tokens": tokens,
        "bytes_per_token": round(num_bytes / tokens, 4) if tokens else None,
        "ids_used": int(used.sum()),
        "unknown": unknown,
        "round_trip": same,
    }


def _unknown_id(tokenizer: Tokenizer) -> int:
    """The id of the unknown token, or -1. Unigram models store its number, others its name."""
    model = tokenizer.spec["model"]
    if isinstance(model.get("vocab"), dict):
        return model["vocab"].get(model.get("unk_token"), -1)
    number = model.get("unk_id")
    return -1 if number is None else int(number)


def sample_windows(data: Dataset, part: str, count: int, length: int, seed: int) -> list[str]:
    """Some windows of a part as text, with a mark where a document begins."""
    tokens, starts = (data.train, data.train_starts) if part == "train" else (data.val, data.val_starts)
    length = min(length, len(tokens))
    places = draws(key(seed, "sample", part), 0, count) % np.uint64(len(tokens) - length + 1)
    return [_marked(data.tokenizer, tokens, starts, int(place), length) for place in places]


def _marked(tokenizer: Tokenizer, tokens: Tokens, starts: np.ndarray | None, place: int, length: int) -> str:
    inside = [] if starts is None else sorted({int(s) for s in starts[(starts >= place) & (starts < place + length)]})
    edges = [place, *(s for s in inside if s > place), place + length]
    texts = [tokenizer.decode(tokens[a:b]) for a, b in itertools.pairwise(edges)]
    return ("⟦document⟧" if place in inside else "") + "⟦document⟧".join(texts)
