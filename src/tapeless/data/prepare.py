"""From a configuration to token files, once: a run keeps its own, so that nothing outside can change what a resume sees.

    folder/  train.bin  val.bin  tokenizer.json  data.json (written last: where it is, all is)
The fingerprint is of content alone: the tokenizer and both token files.
Judged by: tests/data/test_prepare.py."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from tapeless.config import TrainConfig
from tapeless.data.corpora import stdlib, stdlib_docs
from tapeless.data.files import canonical_json, file_sha256, write_json, writing
from tapeless.data.loader import require_window
from tapeless.data.read import Document, read_documents
from tapeless.data.shards import open_tokens, write_tokens
from tapeless.data.split import join, split
from tapeless.data.synthetic import SOURCES, Source
from tapeless.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer, pieces
from tapeless.errors import UNREADABLE, DataError

FORMAT_VERSION = 1
RECORD = {"source", "num_documents", "synthetic", "bytes_per_token", "fingerprint"}  # what data.json must say


class Dataset(NamedTuple):
    train: np.ndarray  # (n,) memory map
    val: np.ndarray  # (m,)
    tokenizer: Tokenizer
    fingerprint: str
    floor: float | None  # entropy rate of the source in nats per token, where it is known
    bytes_per_token: float  # of the validation part
    source: str  # in words
    num_documents: int
    true_source: Source | None  # where every token is one symbol of a synthetic source

    def source_loss(self, tokens: Tensor, targets: Tensor) -> float | None:  # (N, T) both
        """The true source's own mean loss on these windows: what a perfect model would have."""
        if self.true_source is None:
            return None
        byte_of = np.array([self.tokenizer.table[i][0] for i in range(self.tokenizer.vocab_size)])
        first, wanted = np.asarray(tokens[:, 0]), np.asarray(targets)
        return self.true_source.loss(byte_of[first], np.where(wanted >= 0, byte_of[np.maximum(wanted, 0)], wanted))


def prepare(config: TrainConfig, vocab_size: int | None, folder: Path) -> Dataset:
    """Read, split, tokenize and write. `vocab_size` is the model's, None where it is still open; a tokenizer may have fewer
    ids (the caller says so), not more."""
    documents = _documents(config)
    training, validation = (join(texts) for texts in split([document.text for document in documents]))
    # The characters of all the data, since a character without an id could not even be evaluated; merges of the training part.
    tokenizer = make_tokenizer(config.tokenizer, training + validation if config.tokenizer == "char" else training, vocab_size)
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise DataError(
            f"vocab_size {vocab_size} is below the {tokenizer.vocab_size} ids of the tokenizer ({config.tokenizer}); "
            f"set --vocab-size to {tokenizer.vocab_size} or more"
        )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "data.json").unlink(missing_ok=True)
    tokenizer.save(folder / "tokenizer.json")
    counts = {}
    for part, name, text in (("train", "training", training), ("val", "validation", validation)):
        counts[part] = write_tokens(
            folder / f"{part}.bin",
            map(tokenizer.encode, pieces(text)),
            vocab_size=tokenizer.vocab_size,
            fingerprint=tokenizer.fingerprint,
        )
        require_window(counts[part], config.seq_len or 1, name)
    synthetic = config.dataset_path is None and config.corpus in SOURCES and tokenizer.kind in ("bytes", "char")
    record = {
        "format_version": FORMAT_VERSION,
        "source": _describe(config, documents),
        "source_sha256": _hash_of(documents),
        "num_documents": len(documents),
        "synthetic": config.corpus if synthetic else None,
        "bytes_per_token": len(validation.encode()) / counts["val"],
        "fingerprint": _fingerprint(folder, tokenizer),
    }
    write_json(folder / "data.json", record)
    return _open(folder, record, tokenizer)


def fingerprints(folder: Path) -> dict[str, str]:
    """Of what lies there now, by the names that a run's configuration has them under."""
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    try:
        return {"tokenizer_hash": tokenizer.fingerprint, "dataset_fingerprint": _fingerprint(folder, tokenizer)}
    except OSError as error:
        raise UNREADABLE(path=error.filename, reason=error.strerror) from None


def source_hashes(folder: Path, config: TrainConfig) -> tuple[str, str]:
    """Of the text that was prepared, and of the text that a configuration names now."""
    try:
        before = json.loads((folder / "data.json").read_text(encoding="utf-8"))["source_sha256"]
    except (OSError, ValueError, LookupError, TypeError):
        before = "unknown"  # open_prepared says what is wrong with the file
    return before, _hash_of(_documents(config))


def open_prepared(folder: Path, found: str | None = None) -> Dataset:
    """What `prepare` wrote, if it is all there and unaltered. found: its fingerprint, where it was taken just now."""
    try:
        record = json.loads((folder / "data.json").read_text(encoding="utf-8"))
        version, whole = record["format_version"], record.keys() >= RECORD and record["synthetic"] in (None, *SOURCES)
    except FileNotFoundError:
        raise DataError(f"{folder}: no prepared data here: data.json is missing") from None
    except (ValueError, KeyError, TypeError):
        version, whole = FORMAT_VERSION, False
    if version != FORMAT_VERSION:
        raise DataError(f"{folder / 'data.json'}: format {version}, this tapeless reads {FORMAT_VERSION}; use a newer tapeless")
    if not whole:
        raise DataError(f"{folder / 'data.json'}: damaged; expected what `tapeless train new` wrote")
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    dataset = _open(folder, record, tokenizer)
    found = found or _fingerprint(folder, tokenizer)
    if found != dataset.fingerprint:
        raise DataError(
            f"{folder}: the data changed since the run began: fingerprint {found[:12]}, expected {dataset.fingerprint[:12]}; "
            "restore train.bin, val.bin and tokenizer.json, or begin a new run"
        )
    return dataset


def without_text(folder: Path) -> Dataset:
    """A tokenizer alone, of a model that was not trained here."""
    tokenizer, nothing = load_tokenizer(folder / "tokenizer.json"), np.empty(0, np.uint16)
    return Dataset(nothing, nothing, tokenizer, "", None, float("nan"), "no text: imported", 0, None)


def with_text(data: Dataset, path: str) -> Dataset:
    """The same tokenizer, and a text of another origin to be evaluated on, all of it."""
    documents = read_documents(path)
    text = join([document.text for document in documents])
    ids = np.concatenate([data.tokenizer.encode(piece) for piece in pieces(text)])  # (m,)
    require_window(len(ids), 1, "evaluation")
    source = f"{path}: {len(text):,} characters"
    about: dict[str, Any] = {
        "bytes_per_token": len(text.encode()) / len(ids),
        "source": source,
        "num_documents": len(documents),
    }
    return data._replace(val=ids, floor=None, true_source=None, **about)


def _documents(config: TrainConfig) -> list[Document]:
    if config.dataset_path is not None:
        return read_documents(config.dataset_path)
    if config.corpus in SOURCES:
        source = SOURCES[config.corpus]()
        return [Document(source.name, source.generate(source.num_symbols).decode())]
    return stdlib() if config.corpus == "stdlib" else stdlib_docs()


def _hash_of(documents: list[Document]) -> str:
    return hashlib.sha256(canonical_json(documents)).hexdigest()


def _describe(config: TrainConfig, documents: list[Document]) -> str:
    size = sum(len(document.text) for document in documents)
    count = "1 document" if len(documents) == 1 else f"{len(documents)} documents"
    return f"{config.dataset_path or config.corpus}: {count}, {size:,} characters"


def _fingerprint(folder: Path, tokenizer: Tokenizer) -> str:
    parts = (tokenizer.fingerprint, file_sha256(folder / "train.bin"), file_sha256(folder / "val.bin"))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def _open(folder: Path, record: dict[str, Any], tokenizer: Tokenizer) -> Dataset:
    train, val = (open_tokens(folder / f"{part}.bin", tokenizer.fingerprint) for part in ("train", "val"))
    true_source = SOURCES[record["synthetic"]]() if record["synthetic"] else None
    floor = true_source.entropy_rate if true_source else None
    about = (record["bytes_per_token"], record["source"], record["num_documents"])
    return Dataset(train, val, tokenizer, record["fingerprint"], floor, *about, true_source)
