"""From a configuration to token files, once: a run keeps its own, so that nothing outside can change what a resume sees.

    folder/  train.bin  val.bin  train.starts.npy  val.starts.npy  tokenizer.json  data.json (written last: where it is, all is)
*.starts.npy says at which token each document begins; instructions have *.roles.bin instead (instructions.py). A folder that
`tapeless data prepare` wrote, or one of token files, is taken over as it is, by links where the disk has them. A source is read
once to look at it and once for each part, piece by piece, so the memory does not grow with it. The fingerprint is of content
alone: the tokenizer, the tokens, the documents.
Tested by: tests/data/test_prepare.py."""

import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tapeless.config import TrainConfig
from tapeless.data.corpora import Document, stdlib, stdlib_docs
from tapeless.data.encode import encoded, usable_cores
from tapeless.data.external import hash_of_files, kept_files, open_joined, token_files
from tapeless.data.files import atomic_write, file_sha256, link, write_json, writing
from tapeless.data.instructions import (
    COUNTS,
    hash_of_examples,
    holds_examples,
    open_roles,
    read_examples,
    split_examples,
    texts_of,
    write_examples,
)
from tapeless.data.joined import Tokens
from tapeless.data.pieces import document
from tapeless.data.read import read_pieces
from tapeless.data.shards import CHUNK, open_tokens, require_window, write_tokens
from tapeless.data.split import num_copies
from tapeless.data.survey import Part, Source, divided, given, survey
from tapeless.data.synthetic import SOURCES
from tapeless.data.synthetic import Source as TrueSource
from tapeless.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer
from tapeless.errors import NO_TOKENIZER, UNREADABLE, DataError

if TYPE_CHECKING:
    from torch import Tensor  # preparing data needs no torch, which takes seconds to load

FORMAT_VERSION = 1
RECORD = {"source", "source_sha256", "num_documents", "synthetic", "bytes_per_token", "fingerprint"}  # what data.json must say
PARTS = {"train": "training", "val": "validation"}


class Dataset(NamedTuple):
    train: Tokens  # (n,) memory map, or several as one
    val: Tokens  # (m,)
    tokenizer: Tokenizer
    fingerprint: str
    floor: float | None  # entropy rate of the source in nats per token, where it is known
    bytes_per_token: float  # of the validation part
    source: str  # in words
    num_documents: int
    true_source: TrueSource | None  # where every token is one symbol of a synthetic source
    train_starts: np.ndarray | None = None  # (d,) int64: the first token of each document, where they are known
    val_starts: np.ndarray | None = None
    roles: tuple[np.ndarray, np.ndarray] | None = None  # of train and val, where these are examples (instructions.py)

    def counted(self) -> tuple[Tokens, Tokens]:
        """The tokens of both parts that a loss counts."""
        if self.roles is None:
            return self.train, self.val
        return self.train[(self.roles[0] & COUNTS) > 0], self.val[(self.roles[1] & COUNTS) > 0]

    def beginning(self) -> np.ndarray:  # (n,)
        """What a sample continues: the first token that was held out, or the first prompt."""
        return self.val[:1] if self.roles is None else self.val[: max(1, int(np.argmax(self.roles[1] & COUNTS)))]

    def source_loss(self, tokens: "Tensor", targets: "Tensor") -> float | None:  # (N, T) both
        """The true source's own mean loss on these windows: what a perfect model would have."""
        if self.true_source is None:
            return None
        byte_of = np.array([self.tokenizer.table[i][0] for i in range(self.tokenizer.vocab_size)])
        first, wanted = np.asarray(tokens[:, 0]), np.asarray(targets)
        return self.true_source.loss(byte_of[first], np.where(wanted >= 0, byte_of[np.maximum(wanted, 0)], wanted))


def prepare(
    config: TrainConfig, vocab_size: int | None, folder: Path, *, processes: int | None = None, end: Sequence[int] = ()
) -> Dataset:
    """Read, split, tokenize and write, or take over what is prepared already. `vocab_size` is the model's, None where it is
    still open; a tokenizer may have fewer ids (the caller says so), not more. processes: all cores by default. end: the tokens
    behind a completion, where the model has some for that."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "data.json").unlink(missing_ok=True)
    already = config.dataset_path is not None and take_over(Path(config.dataset_path), config, vocab_size, folder)
    if already:
        return already
    if config.dataset_path is not None and holds_examples(config.dataset_path, config.text_field):
        return _prepare_examples(config, vocab_size, folder, end)
    source, parts, facts = _look(config)
    learned_from = parts if config.tokenizer == "char" else parts[:1]
    # The characters of all the data, since a character without an id could not even be evaluated; merges of the training part.
    texts = (piece.text for part in learned_from for piece in part.texts())
    tokenizer = make_tokenizer(config.tokenizer, texts, vocab_size)
    _require_room(tokenizer, vocab_size)
    tokenizer.save(folder / "tokenizer.json")
    for part, name in zip(parts, PARTS, strict=True):
        count, num_bytes = _write_part(part, tokenizer, folder, name, processes or usable_cores())
        require_window(count, config.seq_len or 1, PARTS[name])
    synthetic = config.dataset_path is None and config.corpus in SOURCES and tokenizer.kind in ("bytes", "char")
    record = {
        "format_version": FORMAT_VERSION,
        "source": source,
        **facts,
        "synthetic": config.corpus if synthetic else None,
        "bytes_per_token": num_bytes / count,  # of the part written last, the validation part
        "fingerprint": _fingerprint(folder, tokenizer),
    }
    write_json(folder / "data.json", record)
    return _open(folder, record, tokenizer)


def _prepare_examples(config: TrainConfig, vocab_size: int | None, folder: Path, end: Sequence[int]) -> Dataset:
    assert config.dataset_path is not None
    if config.val_path is not None:
        raise DataError(f"{config.dataset_path} holds instructions, of which a tenth is held out; leave out val_path")
    examples = read_examples(config.dataset_path)
    training, validation = split_examples(examples)
    learned_from = texts_of(examples if config.tokenizer == "char" else training)
    tokenizer = make_tokenizer(config.tokenizer, learned_from, vocab_size)
    _require_room(tokenizer, vocab_size)
    tokenizer.save(folder / "tokenizer.json")
    write_examples(folder, "train", training, tokenizer, end)
    held_out = write_examples(folder, "val", validation, tokenizer, end)
    record = {
        "format_version": FORMAT_VERSION,
        "source": f"{config.dataset_path}: {len(examples):,} examples of instructions",
        "source_sha256": hash_of_examples(examples),
        "num_documents": len(examples),
        "synthetic": None,
        "bytes_per_token": held_out.counted_bytes / held_out.counted_tokens,
        "fingerprint": _fingerprint(folder, tokenizer),
    }
    write_json(folder / "data.json", record)
    return _open(folder, record, tokenizer)


def _look(config: TrainConfig) -> tuple[str, tuple[Part, Part], dict[str, Any]]:
    """What the source is in words, its two parts, and what data.json says of it."""
    name, source = config.dataset_path or config.corpus, _source(config)
    found, dropped = survey(source(), name), 0
    digests, size, hashes = [found.digests[~found.blank]], int(found.sizes[~found.blank].sum()), found.fingerprint
    if config.val_path is None:
        training, validation = divided(source, found)
    else:
        apart = partial(read_pieces, config.val_path, config.text_field)
        held = survey(apart(), config.val_path)
        training, validation, dropped = given(source, found, apart, held)
        digests.append(held.digests[validation.wanted])
        size += validation.num_characters
        hashes = hashlib.sha256(f"{hashes} {held.fingerprint}".encode()).hexdigest()
    count = sum(map(len, digests))
    facts = {
        "source_sha256": hashes,
        "num_documents": count,
        "num_copies": sum(map(num_copies, digests)),
        "val_dropped": dropped,
    }
    words = f"{name}: {'1 document' if count == 1 else f'{count} documents'}, {size:,} characters"
    return words, (training, validation), facts


def _source(config: TrainConfig) -> Source:
    if config.dataset_path is not None:
        return partial(read_pieces, config.dataset_path, config.text_field)
    if config.corpus in SOURCES:
        synthetic = SOURCES[config.corpus]()
        documents = [Document(synthetic.name, synthetic.generate(synthetic.num_symbols).decode())]
    else:
        documents = stdlib() if config.corpus == "stdlib" else stdlib_docs()
    return lambda: (piece for one in documents for piece in document([one.text]))


def _write_part(part: Part, tokenizer: Tokenizer, folder: Path, name: str, processes: int) -> tuple[int, int]:
    """The tokens of a part and where its documents begin; returns how many tokens and bytes of text it has."""
    starts, count, num_bytes, begins = array("q"), 0, 0, True

    def ids() -> Iterator[np.ndarray]:
        nonlocal count, num_bytes, begins
        saved = folder / "tokenizer.json"
        found = encoded(tokenizer, saved, part.texts(), num_characters=part.num_characters, processes=processes)
        for batch, arrays in found:
            for piece, of_piece in zip(batch, arrays, strict=True):
                if begins:
                    starts.append(count)
                begins, count = piece.last, count + len(of_piece)
                num_bytes += len(piece.text.encode())
            yield np.concatenate(arrays)

    write_tokens(folder / f"{name}.bin", ids(), vocab_size=tokenizer.vocab_size, fingerprint=tokenizer.fingerprint)
    with atomic_write(folder / f"{name}.starts.npy") as file:
        np.lib.format.write_array(file, np.array(starts, "<i8"), allow_pickle=False)
    return count, num_bytes


def take_over(path: Path, config: TrainConfig, vocab_size: int | None, folder: Path) -> Dataset | None:
    """Data that is tokens already; None where it is text."""
    prepared = (path / "data.json").is_file()
    files = None if prepared else token_files(path)
    if not prepared and files is None:
        return None
    if config.val_path is not None:
        raise DataError(f"{path} is tokens already, those to validate on among them: leave out val_path")
    if files is None:
        dataset = open_prepared(path)
        tokenizer = dataset.tokenizer
        same = config.tokenizer in ("bytes", tokenizer.kind)  # bytes is the default
        if not same and config.tokenizer not in ("char", "bpe"):
            same = load_tokenizer(Path(config.tokenizer)).fingerprint == tokenizer.fingerprint
        if not same:
            raise DataError(f"{path}: is prepared with a tokenizer of its own; leave --tokenizer {config.tokenizer} out")
        names = [name for name in os.listdir(path) if name in {"data.json", *_data_files(path)}]
    else:
        pickled = (path / "meta.pkl").exists()  # so the ids are characters, by a table that is never read
        if config.tokenizer in ("char", "bpe") or (pickled and config.tokenizer == "bytes"):
            raise NO_TOKENIZER(path=path, pickle=", and meta.pkl is a pickle, which is never read" if pickled else "")
        tokenizer, names = make_tokenizer(config.tokenizer, "", None), []
        tokenizer.save(folder / "tokenizer.json")
        for part, of_part in files.items():
            open_joined(of_part, tokenizer.vocab_size)
            for number, file in enumerate(of_part):
                link(file, folder / (f"{part}.bin" if len(of_part) == 1 else f"{part}-{number:06d}.bin"))
    _require_room(tokenizer, vocab_size)
    for name in sorted(names, key=lambda name: name == "data.json"):
        link(path / name, folder / name)
    if not names:
        record = _foreign_record(path, folder, tokenizer)
        write_json(folder / "data.json", record)
    dataset = open_prepared(folder)
    for tokens, name in ((dataset.train, "training"), (dataset.val, "validation")):
        require_window(len(tokens), config.seq_len or 1, name)
    return dataset


def _foreign_record(path: Path, folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    files = {part: kept_files(folder, part) for part in PARTS}
    train, val = (open_joined(of_part, tokenizer.vocab_size) for of_part in files.values())
    num_bytes = sum(len(tokenizer.decode_bytes(val[first : first + CHUNK])) for first in range(0, len(val), CHUNK))
    return {
        "format_version": FORMAT_VERSION,
        "source": f"{path}: token files, {len(train) + len(val):,} tokens",
        "source_sha256": hash_of_files(files),
        "num_documents": 1,
        "foreign": True,
        "synthetic": None,
        "bytes_per_token": num_bytes / len(val),
        "fingerprint": _fingerprint(folder, tokenizer),
    }


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
    path = Path(config.dataset_path or "")
    if config.dataset_path and (path / "data.json").is_file():
        return before, read_record(path)["source_sha256"]
    files = token_files(path) if config.dataset_path else None
    if config.dataset_path and not files and holds_examples(config.dataset_path, config.text_field):
        return before, hash_of_examples(read_examples(config.dataset_path))
    return before, hash_of_files(files) if files else _look(config)[2]["source_sha256"]


def open_prepared(folder: Path, found: str | None = None) -> Dataset:
    """What `prepare` wrote, if it is all there and unaltered. found: its fingerprint, where it was taken just now."""
    record = read_record(folder)
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
    if holds_examples(path, "text"):
        raise DataError(f"{path} holds instructions; a text is evaluated as a whole, so give one, or JSONL with a `text` field")
    source = partial(read_pieces, path)
    found = survey(source(), path)
    texts = list(Part(source, found.sizes, ~found.blank).texts())
    arrays = data.tokenizer.encode_all([piece.text for piece in texts])
    ids = np.concatenate(arrays)  # (m,)
    require_window(len(ids), 1, "evaluation")
    ends = np.cumsum([len(x) for x in arrays])[[piece.last for piece in texts]]  # (d,)
    about: dict[str, Any] = {
        "bytes_per_token": sum(len(piece.text.encode()) for piece in texts) / len(ids),
        "source": f"{path}: {int(found.sizes.sum()):,} characters",
        "num_documents": len(ends),
        "val_starts": np.concatenate([[0], ends[:-1]]),
    }
    return data._replace(val=ids, floor=None, true_source=None, roles=None, **about)


def read_record(folder: Path) -> dict[str, Any]:
    """data.json."""
    try:
        record = json.loads((folder / "data.json").read_text(encoding="utf-8"))
        version, whole = record["format_version"], record.keys() >= RECORD and record["synthetic"] in (None, *SOURCES)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{folder}: no prepared data here: data.json is missing; first: tapeless data prepare") from None
    except OSError as error:
        raise UNREADABLE(path=folder / "data.json", reason=error.strerror) from None
    except (ValueError, KeyError, TypeError):
        version, whole = FORMAT_VERSION, False
    if version != FORMAT_VERSION:
        raise DataError(f"{folder / 'data.json'}: format {version}, this tapeless reads {FORMAT_VERSION}; use a newer tapeless")
    if not whole:
        raise DataError(f"{folder / 'data.json'}: damaged; expected what `tapeless train new` wrote")
    return record


def _require_room(tokenizer: Tokenizer, vocab_size: int | None) -> None:
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise DataError(
            f"vocab_size {vocab_size} is below the {tokenizer.vocab_size} ids of the tokenizer ({tokenizer.kind}); "
            f"set --vocab-size to {tokenizer.vocab_size} or more"
        )


def _data_files(folder: Path) -> list[str]:
    """What makes up the data but for data.json. Runs from before documents were kept have no *.starts.npy."""
    starts = [f"{part}.starts.npy" for part in PARTS if (folder / f"{part}.starts.npy").is_file()]
    roles = [f"{part}.roles.bin" for part in PARTS if (folder / f"{part}.roles.bin").is_file()]
    tokens = [file.name for part in PARTS for file in kept_files(folder, part)]
    return ["tokenizer.json", *tokens, *starts, *roles]


def _fingerprint(folder: Path, tokenizer: Tokenizer) -> str:
    hashes = {name: file_sha256(folder / name) for name in _data_files(folder)[1:]}
    several = any("-" in name for name in hashes)  # then it counts which part a file is of
    parts = (tokenizer.fingerprint, *(f"{name}:{digest}" if several else digest for name, digest in hashes.items()))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def _open(folder: Path, record: dict[str, Any], tokenizer: Tokenizer) -> Dataset:
    if record.get("foreign"):
        train, val = (open_joined(kept_files(folder, part), tokenizer.vocab_size) for part in PARTS)
    else:
        train, val = (open_tokens(folder / f"{part}.bin", tokenizer.fingerprint) for part in PARTS)
    starts = [_open_starts(folder / f"{part}.starts.npy", len(x)) for part, x in zip(PARTS, (train, val), strict=True)]
    true_source = SOURCES[record["synthetic"]]() if record["synthetic"] else None
    floor = true_source.entropy_rate if true_source else None
    about = (record["bytes_per_token"], record["source"], record["num_documents"])
    roles = None
    if (folder / "train.roles.bin").is_file():
        roles = open_roles(folder, "train", tokenizer), open_roles(folder, "val", tokenizer)
    return Dataset(train, val, tokenizer, record["fingerprint"], floor, *about, true_source, starts[0], starts[1], roles)


def _open_starts(path: Path, num_tokens: int) -> np.ndarray | None:  # (d,) int64
    if not path.is_file():
        return None
    try:
        starts = np.load(path, allow_pickle=False)
        good = starts.dtype == "<i8" and starts.ndim == 1 and starts[0] == 0 and (np.diff(starts) >= 0).all()
        good = good and starts[-1] <= num_tokens
    except (ValueError, EOFError, IndexError):
        good = False
    if not good:
        raise DataError(f"{path}: damaged; expected where the documents begin; prepare the data again")
    return starts
