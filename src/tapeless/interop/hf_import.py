"""Import of a Hugging Face directory: configuration, weights, tokenizer, generation settings. Nothing in it is trusted or run.

The order makes it safe: config.json describes the model, the headers describe the files, the two are compared, and only then
are values read, tensor by tensor, never more than the files' own bytes. Weights are read from safetensors only: the older .bin
files are pickles, which can run code when they are loaded.
Tested by: tests/interop/test_hf_import.py, tests/faults/test_hostile.py."""

import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from tapeless.config import ModelConfig
from tapeless.data.chat import FILE as CHAT_TEMPLATE
from tapeless.data.chat import renderer
from tapeless.data.tokenizer import Tokenizer, tokenizer_of
from tapeless.errors import PICKLE, DataError, InputError, UntrustedFileError
from tapeless.interop.families import family_named
from tapeless.interop.family import Family
from tapeless.interop.generation import FILE as GENERATION
from tapeless.interop.generation import Generation, read_generation
from tapeless.interop.tensor_file import Entry, TensorFile
from tapeless.interop.untrusted import MEBIBYTE, check_name, exists, read_bytes, read_json

CONFIG, WEIGHTS, INDEX, TOKENIZER = "config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
LIMITS = {CONFIG: MEBIBYTE, INDEX: 32 * MEBIBYTE, TOKENIZER: 128 * MEBIBYTE, GENERATION: MEBIBYTE}
LIMITS |= {TOKENIZER_CONFIG: 16 * MEBIBYTE, CHAT_TEMPLATE: MEBIBYTE}
MAX_SHARDS = 256  # all are open at once
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


class ExternalModel(NamedTuple):
    family: Family
    config: ModelConfig
    params: dict[str, Tensor]  # float32, under our names
    tokenizer: Tokenizer | None
    generation: Generation
    chat_template: str | None
    notes: list[str]  # for the user


def is_hugging_face(folder: Path) -> bool:
    return exists(folder, CONFIG)


def read_model(folder: Path) -> ExternalModel:
    if not folder.is_dir():
        raise UntrustedFileError(
            f"{folder} is not a directory; expected one with {CONFIG} and {WEIGHTS}; archives are not unpacked"
        )
    if not exists(folder, CONFIG):
        raise UntrustedFileError(f"{folder}: no {CONFIG}; is it a Hugging Face directory?")
    settings = read_json(folder, CONFIG, LIMITS[CONFIG])
    family = family_named(settings, str(folder / CONFIG))
    config, notes = family.read_settings(settings, str(folder / CONFIG))
    with ExitStack() as opened:
        stored = _check_tensors(family, config, _open_files(folder, opened), notes)  # before the tokenizer is parsed
        tokenizer = read_tokenizer(folder, config.vocab_size)
        # older directories have the generation settings in config.json
        own = read_json(folder, GENERATION, LIMITS[GENERATION]) if exists(folder, GENERATION) else settings
        generation, more = read_generation(own, config.vocab_size)
        notes += more
        params = family.from_hf(config, lambda name: stored[name].read())
        if config.tie_embeddings and family.head in stored:  # then it must equal the embedding
            head = stored[family.head]
            if head.shape != tuple(params["embed.w"].shape) or not head.read().equal(params["embed.w"]):
                raise InputError(f"{family.head} differs from the embedding, although tie_word_embeddings is true")
    if tokenizer is not None and tokenizer.vocab_size < config.vocab_size:
        unused = config.vocab_size - tokenizer.vocab_size
        notes.append(f"the vocabulary of {config.vocab_size} has {unused} ids without a token; they are never sampled")
    return ExternalModel(family, config, params, tokenizer, generation, read_chat_template(folder, notes), notes)


def _open_files(folder: Path, opened: ExitStack) -> dict[str, Entry]:
    """The tensors of all files by name; every header is read and checked."""
    if exists(folder, WEIGHTS):
        return _open(folder, WEIGHTS, opened)
    if not exists(folder, INDEX):
        pickles = sorted(path.name for path in folder.iterdir() if path.name.lower().endswith(PICKLES))
        if pickles:
            expected = "safetensors: if you trust it, load it with transformers and call save_pretrained"
            raise PICKLE(path=f"{folder}, {pickles[0]!r:.120}", expected=expected)
        raise UntrustedFileError(f"{folder}: no weights; expected {WEIGHTS}, or {INDEX} and its files")
    weight_map = read_json(folder, INDEX, LIMITS[INDEX]).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UntrustedFileError(f"{folder / INDEX}: expected a weight_map from tensors to files, got {weight_map!r:.80}")
    shards = sorted({check_name(name, str(folder / INDEX)) for name in weight_map.values()})
    if len(shards) > MAX_SHARDS:
        raise UntrustedFileError(f"{folder / INDEX}: {len(shards)} files; at most {MAX_SHARDS} are read")
    entries = {}
    for shard in shards:
        found = _open(folder, shard, opened)
        listed = {name for name, home in weight_map.items() if home == shard}
        if listed != found.keys():
            odd = min(listed ^ found.keys())
            raise UntrustedFileError(f"{folder / shard} and {INDEX} disagree: {odd!r:.120} is in only one of them")
        entries.update(found)
    return entries


def _open(folder: Path, name: str, opened: ExitStack) -> dict[str, Entry]:
    if name.lower().endswith(PICKLES):
        raise PICKLE(path=folder / name, expected="safetensors")
    file = TensorFile(folder, name)
    opened.callback(file.close)
    return file.entries


def _check_tensors(family: Family, config: ModelConfig, entries: dict[str, Entry], notes: list[str]) -> dict[str, Entry]:
    """The tensors by their name in the family's table: exactly those of the configuration."""
    stored = {name: entries[in_file] for name, in_file in family.full_names(entries).items()}
    constants = [name for name in stored if re.fullmatch(family.ignored, name)]
    if constants:
        notes.append(f"{len(constants)} tensors are constants of the code, such as {constants[0]}, and are ignored")
        stored = {name: tensor for name, tensor in stored.items() if name not in set(constants)}
    if config.num_layers > len(stored):
        raise InputError(f"config.json has {config.num_layers} layers, but there are only {len(stored)} tensors")
    if not config.tie_embeddings and family.head not in stored:
        head = f"{family.head} {family.shapes(config)[family.head]}"
        raise InputError(f"{head} is missing, and tie_word_embeddings is not true")
    for tensor in stored.values():
        tensor.check_dtype()
    family.check_shapes(config, {name: tensor.shape for name, tensor in stored.items()})
    return stored


def read_tokenizer(folder: Path, vocab_size: int) -> Tokenizer | None:
    if not exists(folder, TOKENIZER):
        return None
    spec = read_json(folder, TOKENIZER, LIMITS[TOKENIZER])
    largest = largest_id(spec)
    if largest >= vocab_size:  # before anything of that size is allocated
        raise InputError(f"{folder / TOKENIZER}: contains the id {largest}, but the model's vocabulary is {vocab_size}")
    tokenizer = tokenizer_of(spec, str(folder / TOKENIZER))
    if tokenizer.vocab_size > vocab_size:
        raise InputError(f"{folder / TOKENIZER}: {tokenizer.vocab_size} ids, but the model's vocabulary is {vocab_size}")
    return tokenizer


def read_chat_template(folder: Path, notes: list[str]) -> str | None:
    """A file of its own, or part of the tokenizer's configuration. One that is no template is ignored with a note: the model
    can be used without it."""
    if exists(folder, CHAT_TEMPLATE):
        try:
            template: object = read_bytes(folder, CHAT_TEMPLATE, LIMITS[CHAT_TEMPLATE]).decode()
        except UnicodeDecodeError:
            template = None
    elif exists(folder, TOKENIZER_CONFIG):
        template = read_json(folder, TOKENIZER_CONFIG, LIMITS[TOKENIZER_CONFIG]).get("chat_template")
        if template is None:
            return None
        if isinstance(template, list):  # several, by name
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = named.get("default")
    else:
        return None
    try:
        if not isinstance(template, str):
            raise DataError("the chat template is not a text")
        renderer(template)
    except DataError as error:
        notes.append(f"{error}; it is ignored")
        return None
    return template


def largest_id(spec: Mapping[str, Any]) -> int:
    """Of all ids in a tokenizer.json."""
    model, added = spec.get("model"), spec.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1] if isinstance(vocab, list) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    return max((i for i in ids if type(i) is int), default=-1)
