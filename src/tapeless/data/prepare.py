"""From a configuration to token files, once: a run has its own copy, so that nothing outside can change what a resume sees.

    folder/  train.bin  val.bin  train.starts.npy  val.starts.npy  tokenizer.json  data.json (written last: marks completeness)
*.starts.npy holds the first token of each document; instructions have *.roles.bin instead (instructions.py), and conversations
chat_template.jinja (chat.py), which is not part of the fingerprint, since its effect is in the tokens. A folder that
`tapeless data prepare` wrote, or one of token files, is reused as it is, through hard links where the disk has them. A source
is read once to index its documents and once to tokenize both parts, in chunks, so memory does not grow with it. Each document
ends with the tokenizer's end of text; without one, there is an empty line between two. The fingerprint is of content alone: the
tokenizer, the tokens, the documents. data.json also holds the baselines, and the state in which each file was last verified
(verification.py).
Tested by: tests/data/test_prepare.py."""

import hashlib
import tempfile
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tapeless.config import TOKENIZERS, TRAINED_TOKENIZERS, TrainConfig
from tapeless.data import columns, instructions, split
from tapeless.data.baselines import Baselines, baselines, token_blocks
from tapeless.data.chat import FILE as CHAT_TEMPLATE
from tapeless.data.chat import ChatFormat, write_template
from tapeless.data.chunks import document_chunks
from tapeless.data.corpora import stdlib, stdlib_docs
from tapeless.data.encode import encode_chunks, usable_cores
from tapeless.data.external import hash_of_files, open_external, part_files, token_files
from tapeless.data.files import atomic_write, canonical_json, file_sha256, link, write_json, writing
from tapeless.data.read import read_chunks, skipped_files
from tapeless.data.synthetic import SOURCES
from tapeless.data.synthetic import Source as TrueSource
from tapeless.data.token_files import BLOCK, Tokens, concat_tokens, open_tokens, require_window, token_writer
from tapeless.data.tokenizer import CHAT, Tokenizer, load_tokenizer, make_tokenizer
from tapeless.data.verification import FileState, file_state, require_ids, require_unaltered, scan_file, to_record
from tapeless.errors import NO_TOKENIZER, UNREADABLE, DataError, WriteError
from tapeless.regular import read_json

if TYPE_CHECKING:
    from tapeless.data.loader import ValidationSet  # needs torch, which takes seconds to load

FORMAT_VERSION = 1
LISTED = 4  # suffixes of skipped files
RECORD: dict[str, Any] = {  # what data.json must hold, and of which type
    "source": str,
    "source_sha256": str,
    "num_documents": int,
    "synthetic": (str, type(None)),
    "bytes_per_token": (int, float),
    "fingerprint": str,
}
PARTS = {"train": "training", "val": "validation"}

Maps = dict[str, Any]  # by file name: np.memmap (n,) of ids, or None if the file holds none
States = dict[str, FileState]


class Dataset(NamedTuple):
    train: Tokens  # (n,) memory map, or several as one
    val: Tokens  # (m,)
    tokenizer: Tokenizer
    fingerprint: str
    bytes_per_token: float  # of the validation part
    source: str  # description for people
    num_documents: int
    end_of_text: int | None = None  # the id after each document, if there is one
    true_source: TrueSource | None = None  # if every token is one symbol of a synthetic source
    train_starts: np.ndarray | None = None  # (d,) int64: the first token of each document, if known
    val_starts: np.ndarray | None = None
    roles: tuple[np.ndarray, np.ndarray] | None = None  # of train and val, if these are examples (instructions.py)
    folder: Path | None = None  # whose data.json stores the baselines
    stored_baselines: Baselines | None = None
    states: States | None = None  # of the files in the folder, as they were verified

    @property
    def floor(self) -> float | None:
        """The entropy rate of the source in nats per token, if it is known."""
        return self.true_source.entropy_rate if self.true_source else None

    def baselines(self) -> Baselines:
        """Of the tokens that the loss counts. Computed once per data set and stored in its data.json if that is writable."""
        if self.stored_baselines is not None:
            return self.stored_baselines
        masks = self.roles or (None, None)
        train, val = (token_blocks(x, mask, instructions.COUNTS) for x, mask in zip((self.train, self.val), masks, strict=True))
        found = baselines(train, val, self.tokenizer.vocab_size)
        if self.folder is not None:
            _update_record(self.folder, {"baselines": found._asdict()})
        return found

    def require_unaltered(self) -> None:
        """Raise if a file was written into since it was verified."""
        if self.folder is not None and self.states is not None:
            require_unaltered(self.folder, self.states)

    def beginning(self) -> np.ndarray:  # (n,)
        """What a sample continues: the first validation token, or the first prompt."""
        return self.val[:1] if self.roles is None else self.val[: max(1, int(np.argmax(self.roles[1] & instructions.COUNTS)))]

    def source_loss(self, windows: "ValidationSet") -> float | None:
        """The true source's own mean loss on these windows: what a perfect model would have."""
        if self.true_source is None:
            return None
        byte_of = np.array([self.tokenizer.table[i][0] for i in range(self.tokenizer.vocab_size)])
        ((tokens, targets, *_),) = windows.batches(len(windows))  # a synthetic corpus is small
        first, wanted = np.asarray(tokens[:, 0]), np.asarray(targets)
        return self.true_source.loss(byte_of[first], np.where(wanted >= 0, byte_of[np.maximum(wanted, 0)], wanted))


def prepare(
    config: TrainConfig,
    vocab_size: int | None,
    folder: Path,
    *,
    processes: int | None = None,
    bos_id: int | None = None,
    eos_ids: Sequence[int] = (),
    chat_template: str | None = None,
) -> Dataset:
    """Read, split, tokenize and write, or reuse what is prepared already. config: says which text, and how it is split and
    tokenized. vocab_size: the model's, None if undecided; a tokenizer may have fewer ids, not more. folder: for the token
    files; Trainer and tapeless.train read them there. processes: all cores by default. bos_id, eos_ids, chat_template: those of
    the model that training starts from, for instructions."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "data.json").unlink(missing_ok=True)
    already = config.dataset_path is not None and _reuse_tokens(Path(config.dataset_path), config, vocab_size, folder)
    if already:
        return already
    if config.dataset_path is not None and instructions.holds_examples(config.dataset_path, config.text_field):
        return _prepare_examples(
            config, vocab_size, folder, lambda t: ChatFormat(t, chat_template, bos_id=bos_id, eos_ids=eos_ids)
        )
    source, selections, facts = _select(config)
    # Characters of all the data, since a character without an id could not even be evaluated; merges of the training part.
    every = config.tokenizer.removesuffix(CHAT) == "char"
    separated = config.tokenizer == "char"
    used = selections if every else selections[:1]
    chunks = (chunk for selection in used for chunk in selection.chunks(separated=separated))
    texts = (chunk.text for chunk in chunks if every or chunk.part == split.TRAIN)
    tokenizer = _new_tokenizer(config, texts, vocab_size, folder)
    end = tokenizer.end_of_text
    counts, num_bytes = _write_parts(selections, tokenizer, folder, processes or usable_cores(), end)
    for count, name in zip(counts, PARTS.values(), strict=True):
        require_window(count, config.seq_len or 1, name)
    synthetic = config.dataset_path is None and config.corpus in SOURCES and tokenizer.kind in ("bytes", "char")
    about = {"source": source, **facts, "synthetic": config.corpus if synthetic else None, "end_of_text": end is not None}
    return _finish(folder, tokenizer, {**about, "bytes_per_token": num_bytes / counts[split.VAL]})


def _prepare_examples(
    config: TrainConfig, vocab_size: int | None, folder: Path, make_format: Callable[[Tokenizer], ChatFormat]
) -> Dataset:
    assert config.dataset_path is not None
    if config.val_path is not None:
        raise DataError(f"{config.dataset_path} holds instructions, of which a tenth is held out; leave out val_path")
    examples = instructions.read_examples(config.dataset_path)
    training, validation = instructions.split_examples(examples)
    texts = instructions.texts_of(examples if config.tokenizer.removesuffix(CHAT) == "char" else training)
    tokenizer = _new_tokenizer(config, texts, vocab_size, folder)
    chat = make_format(tokenizer)
    instructions.write_examples(folder, "train", training, chat)
    num_bytes, num_tokens = instructions.write_examples(folder, "val", validation, chat)
    if instructions.has_conversations(examples):
        write_template(folder, chat.template)
    record = {
        "source": f"{config.dataset_path}: {instructions.describe(examples)}",
        "source_sha256": instructions.hash_of_examples(examples),
        "num_documents": len(examples),
        "bytes_per_token": num_bytes / num_tokens,
    }
    return _finish(folder, tokenizer, record)


def _finish(folder: Path, tokenizer: Tokenizer, facts: dict[str, Any], known: States | None = None) -> Dataset:
    """Verify the files once, compute the baselines and write data.json. known: of files that were verified just now."""
    record = {"format_version": FORMAT_VERSION, "synthetic": None, **facts}
    maps = _open_files(folder, tokenizer.fingerprint, external="foreign" in facts)
    states = _states(folder, maps, {name: state._asdict() for name, state in (known or {}).items()})
    record |= {"fingerprint": _fingerprint(tokenizer, states), "files": to_record(states)}
    dataset = _dataset(folder, record, tokenizer, maps, states)
    found = dataset._replace(folder=None).baselines()
    write_json(folder / "data.json", record | {"baselines": found._asdict()})
    return dataset._replace(stored_baselines=found)


def _select(config: TrainConfig) -> tuple[str, list[split.Selection], dict[str, Any]]:
    """A description of the source, its documents by part, and what data.json says about it."""
    name, source = config.dataset_path or config.corpus, _source(config)
    index, dropped = split.index_documents(source(), name), 0
    digests, size, hashes = [index.digests[~index.blank]], int(index.sizes[~index.blank].sum()), index.fingerprint
    if config.val_path is None:
        selections = [split.split_source(source, index)]
    else:
        val_source = partial(read_chunks, config.val_path, config.text_field)
        val_index = split.index_documents(val_source(), config.val_path)
        wanted, dropped = split.unseen_documents(index, val_index)
        selections = [
            split.all_documents(source, index, split.TRAIN),
            split.all_documents(val_source, val_index, split.VAL, wanted),
        ]
        digests.append(val_index.digests[wanted])
        size += selections[1].num_characters(split.VAL)
        hashes = hashlib.sha256(f"{hashes} {val_index.fingerprint}".encode()).hexdigest()
    count = sum(map(len, digests))
    facts = {
        "source_sha256": hashes,
        "num_documents": count,
        "num_copies": sum(map(split.num_copies, digests)),
        "val_dropped": dropped,
    }
    words = f"{name}: {'1 document' if count == 1 else f'{count} documents'}, {size:,} characters{_skipped(config)}"
    return words, selections, facts


def _skipped(config: TrainConfig) -> str:
    """What a folder holds that is not text."""
    path = config.dataset_path
    if path is None or not Path(path).is_dir() or columns.is_dataset(path):
        return ""
    files = skipped_files(path).most_common()
    listed = ", ".join(f"{number} {suffix}" for suffix, number in files[:LISTED]) + (", …" if len(files) > LISTED else "")
    return f" ({sum(number for _, number in files):,} files skipped: {listed})" if files else ""


def _source(config: TrainConfig) -> split.DocumentSource:
    if config.dataset_path is not None:
        return partial(read_chunks, config.dataset_path, config.text_field)
    if config.corpus in SOURCES:
        synthetic = SOURCES[config.corpus]()
        texts = [synthetic.generate(synthetic.num_symbols).decode()]
    else:
        texts = list((stdlib() if config.corpus == "stdlib" else stdlib_docs()).values())
    return lambda: (chunk for text in texts for chunk in document_chunks([text]))


def _write_parts(
    selections: Sequence[split.Selection], tokenizer: Tokenizer, folder: Path, processes: int, end_of_text: int | None
) -> tuple[list[int], int]:
    """The tokens of both parts and where their documents begin, in one pass over the text. Returns the tokens of each part,
    and the bytes of the validation text; an end of text has none."""
    starts, counts, begins, num_bytes = (array("q"), array("q")), [0, 0], [True, True], 0
    size = sum(selection.num_characters(part) for selection in selections for part in (split.TRAIN, split.VAL))
    chunks = (chunk for selection in selections for chunk in selection.chunks(separated=end_of_text is None))
    options: dict[str, Any] = {"vocab_size": tokenizer.vocab_size, "fingerprint": tokenizer.fingerprint}
    with ExitStack() as stack:
        writers = [stack.enter_context(token_writer(folder / f"{name}.bin", **options)) for name in PARTS]
        encoded = encode_chunks(tokenizer, folder / "tokenizer.json", chunks, num_characters=size, processes=processes)
        for batch, arrays in encoded:
            by_part: tuple[list[np.ndarray], list[np.ndarray]] = [], []
            for (text, last, part), ids in zip(batch, arrays, strict=True):
                if begins[part]:
                    starts[part].append(counts[part])
                begins[part] = last
                if last and end_of_text is not None:
                    ids = np.append(ids, end_of_text)
                counts[part] += len(ids)
                num_bytes += len(text.encode()) if part == split.VAL else 0
                by_part[part].append(ids)
            for write, ids_of_part in zip(writers, by_part, strict=True):
                if ids_of_part:
                    write(np.concatenate(ids_of_part))
    for name, of_part in zip(PARTS, starts, strict=True):
        with atomic_write(folder / f"{name}.starts.npy") as file:
            np.lib.format.write_array(file, np.array(of_part, "<i8"), allow_pickle=False)
    return counts, num_bytes


def _reuse_tokens(path: Path, config: TrainConfig, vocab_size: int | None, folder: Path) -> Dataset | None:
    """Data that is tokens already; None if it is text."""
    prepared = (path / "data.json").is_file()
    files = None if prepared else token_files(path)
    if not prepared and files is None:
        return None
    if config.val_path is not None:
        raise DataError(f"{path} is tokens already, including those to validate on: leave out val_path")
    if files is None:
        source = open_prepared(path)
        tokenizer = source.tokenizer
        same = config.tokenizer in ("bytes", tokenizer.kind)  # bytes is the default
        if not same and config.tokenizer not in TOKENIZERS:
            same = load_tokenizer(Path(config.tokenizer)).fingerprint == tokenizer.fingerprint
        if not same:
            raise DataError(f"{path}: is prepared with a tokenizer of its own; leave --tokenizer {config.tokenizer} out")
        _require_vocabulary(tokenizer, vocab_size)
        source.baselines()
        template = [CHAT_TEMPLATE] if (path / CHAT_TEMPLATE).is_file() else []
        for name in (*_data_files(path), *template, "data.json"):
            link(path / name, folder / name)
        dataset = open_prepared(folder)
    else:
        pickled = (path / "meta.pkl").exists()  # so the ids are characters, by a table that is never read
        if config.tokenizer in TRAINED_TOKENIZERS or (pickled and config.tokenizer == "bytes"):
            raise NO_TOKENIZER(path=path, pickle=", and meta.pkl is a pickle, which is never read" if pickled else "")
        dataset = _finish_external(path, files, _new_tokenizer(config, (), vocab_size, folder), folder)
    for tokens, name in ((dataset.train, "training"), (dataset.val, "validation")):
        require_window(len(tokens), config.seq_len or 1, name)
    return dataset


def _finish_external(path: Path, files: Mapping[str, list[Path]], tokenizer: Tokenizer, folder: Path) -> Dataset:
    """Token files of other programs, linked into the folder."""
    states: dict[str, FileState] = {}
    digests: dict[str, list[str]] = {part: [] for part in files}
    num_tokens = num_bytes = num_val = 0
    for part, of_part in files.items():
        for number, file in enumerate(of_part):
            tokens = open_external(file)
            state = scan_file(file, tokens)
            require_ids(file, tokens, tokenizer.vocab_size, state)
            name = f"{part}.bin" if len(of_part) == 1 else f"{part}-{number:06d}.bin"
            link(file, folder / name)
            states[name] = state
            digests[part].append(state.sha256)
            num_tokens += len(tokens)
            if part == "val":
                num_val += len(tokens)
                blocks = (tokens[first : first + BLOCK] for first in range(0, len(tokens), BLOCK))
                num_bytes += sum(len(tokenizer.decode_bytes(block)) for block in blocks)
    record = {
        "source": f"{path}: token files, {num_tokens:,} tokens",
        "source_sha256": hash_of_files(digests),
        "num_documents": 1,
        "foreign": True,
        "bytes_per_token": num_bytes / num_val,
    }
    return _finish(folder, tokenizer, record, states)


def fingerprints(folder: Path) -> dict[str, str]:
    """Of the data in a folder now, under the names of a run's configuration, also if they do not match each other."""
    _, tokenizer, _, states = _verified(folder, any_tokenizer=True)
    return {"tokenizer_hash": tokenizer.fingerprint, "dataset_fingerprint": _fingerprint(tokenizer, states)}


def data_facts(folder: Path) -> dict[str, str]:
    """The hash of what data.json says about the data, under its name in a run's configuration. Left out is what is computed
    from the files, and checked by that."""
    record = {name: value for name, value in read_record(folder).items() if name not in ("files", "baselines")}
    return {"data_sha256": hashlib.sha256(canonical_json(record)).hexdigest()}


def source_hashes(folder: Path, config: TrainConfig) -> tuple[str, str]:
    """Of the text that was prepared, and of the text that a configuration names now."""
    try:
        before = read_json(folder / "data.json")["source_sha256"]
    except (OSError, ValueError, LookupError, TypeError):
        before = "unknown"  # open_prepared reports what is wrong with the file
    if config.dataset_path is not None:
        path = Path(config.dataset_path)
        if (path / "data.json").is_file():
            return before, read_record(path)["source_sha256"]
        if files := token_files(path):
            return before, hash_of_files({part: [file_sha256(file) for file in of_part] for part, of_part in files.items()})
        if instructions.holds_examples(config.dataset_path, config.text_field):
            return before, instructions.hash_of_examples(instructions.read_examples(config.dataset_path))
    return before, _select(config)[2]["source_sha256"]


def open_prepared(folder: Path, *, full: bool = False) -> Dataset:
    """What `prepare` wrote, if it is complete and unaltered. Files are read only if they changed since they were last
    verified, or with `full`."""
    record, tokenizer, maps, states = _verified(folder, full=full)
    dataset = _dataset(folder, record, tokenizer, maps, states)
    found = _fingerprint(tokenizer, states)
    if found != dataset.fingerprint:
        raise DataError(
            f"{folder}: the data changed since the run began: fingerprint {found[:12]}, expected {dataset.fingerprint[:12]}; "
            "restore train.bin, val.bin and tokenizer.json, or start a new run"
        )
    return dataset


def _verified(
    folder: Path, *, full: bool = False, any_tokenizer: bool = False
) -> tuple[dict[str, Any], Tokenizer, Maps, States]:
    record = read_record(folder)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    maps = _open_files(folder, None if any_tokenizer else tokenizer.fingerprint, external=bool(record.get("foreign")))
    states = _states(folder, maps, {} if full else record.get("files"))
    recorded = to_record(states)
    if recorded != record.get("files") and _fingerprint(tokenizer, states) == record["fingerprint"]:
        _update_record(folder, {"files": recorded})
    return record, tokenizer, maps, states


def tokenizer_only(folder: Path) -> Dataset:
    """For a model that was not trained here."""
    tokenizer, nothing = load_tokenizer(folder / "tokenizer.json"), np.empty(0, np.uint16)
    return Dataset(nothing, nothing, tokenizer, "", float("nan"), "no text: imported", 0)


def with_text(data: Dataset, path: str) -> Dataset:
    """The same tokenizer, and another text as the validation part."""
    if instructions.holds_examples(path, "text"):
        raise DataError(f"{path} holds instructions; a text is evaluated as a whole, so give one, or JSONL with a `text` field")
    source = partial(read_chunks, path)
    index = split.index_documents(source(), path)
    with tempfile.TemporaryDirectory(prefix="tapeless-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (_, count), num_bytes = _write_parts(
            [split.all_documents(source, index, split.VAL)], data.tokenizer, folder, 1, data.end_of_text
        )
        require_window(count, 1, "evaluation")
        val = open_tokens(folder / "val.bin", data.tokenizer.fingerprint)  # stays readable when the file is gone
        starts = _open_starts(folder / "val.starts.npy", count)
    assert starts is not None
    about: dict[str, Any] = {
        "bytes_per_token": num_bytes / count,
        "source": f"{path}: {int(index.sizes.sum()):,} characters",
        "num_documents": len(starts),
        "val_starts": starts,
    }
    return data._replace(val=val, true_source=None, roles=None, folder=None, stored_baselines=None, **about)


def read_record(folder: Path) -> dict[str, Any]:
    """data.json."""
    try:
        record = read_json(folder / "data.json")
        version, whole = record["format_version"], all(isinstance(record[name], kind) for name, kind in RECORD.items())
        whole = whole and record["synthetic"] in (None, *SOURCES) and 0 < float(record["bytes_per_token"]) < float("inf")
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{folder}: no prepared data here: data.json is missing; first: tapeless data prepare") from None
    except OSError as error:
        raise UNREADABLE(path=folder / "data.json", reason=error.strerror) from None
    except (ValueError, KeyError, TypeError, OverflowError):
        version, whole = FORMAT_VERSION, False
    if version != FORMAT_VERSION:
        raise DataError(f"{folder / 'data.json'}: format {version}, this tapeless reads {FORMAT_VERSION}; use a newer tapeless")
    if not whole:
        raise DataError(f"{folder / 'data.json'}: damaged; expected what `tapeless train new` wrote")
    return record


def _update_record(folder: Path, changes: Mapping[str, Any]) -> None:
    """Remember in data.json what would otherwise be computed again."""
    with suppress(WriteError):
        write_json(folder / "data.json", {**read_record(folder), **changes})


def _new_tokenizer(config: TrainConfig, texts: Iterable[str], vocab_size: int | None, folder: Path) -> Tokenizer:
    tokenizer = make_tokenizer(config.tokenizer, texts, vocab_size)
    _require_vocabulary(tokenizer, vocab_size)
    tokenizer.save(folder / "tokenizer.json")
    return tokenizer


def _require_vocabulary(tokenizer: Tokenizer, vocab_size: int | None) -> None:
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise DataError(
            f"vocab_size {vocab_size} is below the {tokenizer.vocab_size} ids of the tokenizer ({tokenizer.kind}); "
            f"set --vocab-size to {tokenizer.vocab_size} or more"
        )


def _data_files(folder: Path) -> list[str]:
    """All files of a data set but data.json. Older runs have no *.starts.npy."""
    tokens = [file.name for part in PARTS for file in part_files(folder, part)]
    optional = [f"{part}.{kind}" for kind in ("starts.npy", "roles.bin") for part in PARTS]
    return ["tokenizer.json", *tokens, *(name for name in optional if (folder / name).is_file())]


def _open_files(folder: Path, tokenizer_hash: str | None, *, external: bool) -> Maps:
    names, open_file = _data_files(folder)[1:], open_external if external else partial(open_tokens, fingerprint=tokenizer_hash)
    return {name: None if name.endswith(".npy") else open_file(folder / name) for name in names}


def _states(folder: Path, maps: Maps, recorded: Any) -> States:
    recorded = recorded if isinstance(recorded, dict) else {}
    try:
        return {name: file_state(folder / name, tokens, recorded.get(name)) for name, tokens in maps.items()}
    except OSError as error:
        raise UNREADABLE(path=error.filename, reason=error.strerror) from None


def _fingerprint(tokenizer: Tokenizer, states: States) -> str:
    several = any("-" in name for name in states)  # then it also says which part a file belongs to
    parts = (f"{name}:{state.sha256}" if several else state.sha256 for name, state in states.items())
    return hashlib.sha256(" ".join((tokenizer.fingerprint, *parts)).encode()).hexdigest()


def _dataset(folder: Path, record: Mapping[str, Any], tokenizer: Tokenizer, maps: Maps, states: States) -> Dataset:
    for name, tokens in maps.items():
        if tokens is not None:
            require_ids(folder / name, tokens, instructions.ROLES if ".roles." in name else tokenizer.vocab_size, states[name])
    train, val = (concat_tokens([maps[file.name] for file in part_files(folder, part)]) for part in PARTS)
    starts = _open_starts(folder / "train.starts.npy", len(train)), _open_starts(folder / "val.starts.npy", len(val))
    true_source = SOURCES[record["synthetic"]]() if record["synthetic"] else None
    end_of_text = tokenizer.end_of_text if record.get("end_of_text") else None  # older data have none
    about = (record["bytes_per_token"], record["source"], record["num_documents"], end_of_text)
    # If one of them is missing, so is it in the fingerprint of what is here.
    roles = (maps["train.roles.bin"], maps["val.roles.bin"]) if {"train.roles.bin", "val.roles.bin"} <= maps.keys() else None
    stored = _stored_baselines(record)
    return Dataset(train, val, tokenizer, record["fingerprint"], *about, true_source, *starts, roles, folder, stored, states)


def _stored_baselines(record: Mapping[str, Any]) -> Baselines | None:
    try:
        found = Baselines(**record["baselines"])
    except (KeyError, TypeError):  # written before baselines were stored, or damaged
        return None
    return found if all(isinstance(value, float) for value in found) else None


def _open_starts(path: Path, num_tokens: int) -> np.ndarray | None:  # (d,) int64
    if not path.is_file():
        return None
    try:
        starts = np.load(path, allow_pickle=False)
        good = starts.dtype == "<i8" and starts.ndim == 1 and starts[0] == 0 and (np.diff(starts) >= 0).all()
        good = good and starts[-1] <= num_tokens
    except Exception:  # numpy parses the header as Python source, which fails in many ways
        good = False
    if not good:
        raise DataError(f"{path}: damaged; expected the first token of each document; prepare the data again")
    return starts
