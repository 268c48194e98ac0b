"""A Hugging Face directory, read: configuration, weights, tokenizer, generation. Nothing in it is trusted, nothing is run.

The order is what makes it safe: config.json says what the model is, the headers say what the files hold, the two are compared,
and only then are values read, tensor by tensor, never more than the files' own bytes. Weights come from safetensors alone: the
older .bin files are pickles, programs that run when they are read.
Tested by: tests/interop/test_hf_import.py, tests/faults/test_hostile.py."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from tapeless.config import ModelConfig
from tapeless.data.tokenizer import Tokenizer, tokenizer_of
from tapeless.errors import PICKLE, InputError, TapelessError, UntrustedFileError
from tapeless.interop.families import Described, read_settings
from tapeless.interop.generation import FILE as GENERATION
from tapeless.interop.generation import Generation, read_generation
from tapeless.interop.names import CONSTANTS, HEAD, check_shapes, from_hugging_face, full_names, their_shapes
from tapeless.interop.tensor_file import TensorFile
from tapeless.interop.untrusted import MEBIBYTE, check_name, exists, read_json

CONFIG, WEIGHTS, INDEX, TOKENIZER = "config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"
LIMITS = {CONFIG: MEBIBYTE, INDEX: 32 * MEBIBYTE, TOKENIZER: 128 * MEBIBYTE, GENERATION: MEBIBYTE}
MOST_SHARDS = 256  # all are held open at once
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


class ForeignModel(NamedTuple):
    family: str
    config: ModelConfig
    params: dict[str, Tensor]  # float32, under our names
    tokenizer: Tokenizer | None  # None: the directory has none
    generation: Generation
    notes: list[str]  # what a person should know


def is_hugging_face(folder: Path) -> bool:
    return exists(folder, CONFIG)


def read_model(folder: Path) -> ForeignModel:
    if not folder.is_dir():
        raise UntrustedFileError(
            f"{folder} is not a directory; expected one with {CONFIG} and {WEIGHTS}; archives are not unpacked"
        )
    if not exists(folder, CONFIG):
        raise UntrustedFileError(f"{folder}: no {CONFIG} in it; is it a Hugging Face directory?")
    settings = read_json(folder, CONFIG, LIMITS[CONFIG])
    described = read_settings(settings, str(folder / CONFIG))
    notes = list(described.notes)
    with ExitStack() as opened:
        where = _located(folder, opened)  # before the tokenizer: whether the model can be read at all comes first
        names = _fitting(described, where, notes)
        tokenizer = read_tokenizer(folder, described.config.vocab_size)
        generation = _generation(folder, settings, described.config.vocab_size, notes)
        params = from_hugging_face(described.family, described.config, _Values(where, names))
        _check_head(described, where, names, params)
    if tokenizer is not None and tokenizer.vocab_size < described.config.vocab_size:
        more = described.config.vocab_size - tokenizer.vocab_size
        notes.append(f"the vocabulary of {described.config.vocab_size} has {more} ids without a token; they are never drawn")
    return ForeignModel(described.family, described.config, params, tokenizer, generation, notes)


class _Values(Mapping[str, Tensor]):
    """Tensors by the name in the table, each read when it is asked for."""

    def __init__(self, where: Mapping[str, TensorFile], names: Mapping[str, str]):
        self.where, self.names = where, names

    def __getitem__(self, name: str) -> Tensor:
        return self.where[self.names[name]].read(self.names[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _located(folder: Path, opened: ExitStack) -> dict[str, TensorFile]:
    """Name of a tensor -> the file that holds it, every header read and checked."""
    if exists(folder, WEIGHTS):
        file = _open(folder, WEIGHTS, opened)
        return dict.fromkeys(file.entries, file)
    if not exists(folder, INDEX):
        raise _without_weights(folder)
    weight_map = read_json(folder, INDEX, LIMITS[INDEX]).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UntrustedFileError(f"{folder / INDEX}: expected a weight_map from tensors to files, got {weight_map!r:.80}")
    shards = sorted({check_name(name, str(folder / INDEX)) for name in weight_map.values()})
    if len(shards) > MOST_SHARDS:
        raise UntrustedFileError(f"{folder / INDEX}: {len(shards)} files; {MOST_SHARDS} are the most that is read")
    where = {}
    for shard in shards:
        file = _open(folder, shard, opened)
        listed = {name for name, home in weight_map.items() if home == shard}
        if listed != file.entries.keys():
            odd = min(listed ^ file.entries.keys())
            raise UntrustedFileError(f"{folder / shard} and {INDEX} disagree: {odd!r:.120} is in one of them alone")
        where.update(dict.fromkeys(file.entries, file))
    return where


def _open(folder: Path, name: str, opened: ExitStack) -> TensorFile:
    if name.lower().endswith(PICKLES):
        raise PICKLE(path=folder / name, expected="safetensors")
    file = TensorFile(folder, name)
    opened.callback(file.close)
    return file


def _without_weights(folder: Path) -> TapelessError:
    pickles = sorted(path.name for path in folder.iterdir() if path.name.lower().endswith(PICKLES))
    if pickles:
        expected = "safetensors: where you trust it, load it with transformers and save_pretrained it"
        return PICKLE(path=f"{folder}, {pickles[0]!r:.120}", expected=expected)
    return UntrustedFileError(f"{folder}: no weights: expected {WEIGHTS}, or {INDEX} and the files it names")


def _fitting(described: Described, where: Mapping[str, TensorFile], notes: list[str]) -> dict[str, str]:
    """Name in the table -> name in the files, of tensors that are exactly those of the configuration."""
    family, config, _ = described
    full = full_names(family, where)
    constants = [name for name in full if CONSTANTS.fullmatch(name)]
    if constants:
        notes.append(f"{len(constants)} tensors are constants of the code, such as {constants[0]}, and are left out")
    names = {name: stored for name, stored in full.items() if name not in set(constants)}
    if config.num_layers > len(names):
        raise InputError(f"config.json tells of {config.num_layers} layers, but there are {len(names)} tensors in all")
    if not config.tie_embeddings and HEAD not in names:
        raise InputError(f"{HEAD} {their_shapes(family, config)[HEAD]} is missing, and tie_word_embeddings is not true")
    for stored in names.values():
        where[stored].check_dtype(stored)
    check_shapes(family, config, {name: where[stored].entries[stored].shape for name, stored in names.items()})
    return names


def _check_head(
    described: Described, where: Mapping[str, TensorFile], names: Mapping[str, str], params: Mapping[str, Tensor]
) -> None:
    """A tied model may bring its head along, as long as it is the embedding."""
    if described.config.tie_embeddings and HEAD in names:
        stored, embed = names[HEAD], params["embed.w"]
        if where[stored].entries[stored].shape != tuple(embed.shape) or not where[stored].read(stored).equal(embed):
            raise InputError(f"{HEAD} is not the embedding, although tie_word_embeddings is true; one of the two is wrong")


def read_tokenizer(folder: Path, vocab_size: int) -> Tokenizer | None:
    if not exists(folder, TOKENIZER):
        return None
    spec = read_json(folder, TOKENIZER, LIMITS[TOKENIZER])
    largest = largest_id(spec)
    if largest >= vocab_size:  # before anything is made that has a place for each id
        raise InputError(f"{folder / TOKENIZER}: has the id {largest}, but the vocabulary of the model is {vocab_size}")
    tokenizer = tokenizer_of(spec, str(folder / TOKENIZER))
    if tokenizer.vocab_size > vocab_size:
        raise InputError(f"{folder / TOKENIZER}: {tokenizer.vocab_size} ids, but the vocabulary of the model is {vocab_size}")
    return tokenizer


def largest_id(spec: Mapping[str, Any]) -> int:
    """Of the ids that a tokenizer.json speaks of, wherever it keeps them."""
    model, added = spec.get("model"), spec.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1] if isinstance(vocab, list) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    return max((i for i in ids if type(i) is int), default=-1)


def _generation(folder: Path, settings: Mapping[str, Any], vocab_size: int, notes: list[str]) -> Generation:
    """From its own file, or where there is none from config.json, which held the ids before that file was invented."""
    own = read_json(folder, GENERATION, LIMITS[GENERATION]) if exists(folder, GENERATION) else settings
    generation, said = read_generation(own, vocab_size)
    notes += said
    return generation
