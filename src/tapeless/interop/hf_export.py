"""Export to a Hugging Face directory that transformers loads: weights, configuration, tokenizer, generation settings.

    config.json  model.safetensors (or shards and model.safetensors.index.json)  generation_config.json
    tokenizer.json  tokenizer_config.json
config.json has the keys of transformers 5 and of 4. The directory is written under a temporary name and renamed at the end.
Tested by: tests/interop/test_hf_export.py."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tapeless.config import ModelConfig, nearest
from tapeless.data.files import write_json
from tapeless.data.tokenizer import Tokenizer
from tapeless.errors import ConfigError, InputError
from tapeless.interop.families import family_of
from tapeless.interop.family import Family, param_specs
from tapeless.interop.generation import FILE as GENERATION
from tapeless.interop.generation import Generation
from tapeless.interop.hf_import import CONFIG, INDEX, TOKENIZER, TOKENIZER_CONFIG, WEIGHTS

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def export_hugging_face(
    folder: Path,
    config: ModelConfig,
    params: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    generation: Generation,
    *,
    chat_template: str | None = None,
    dtype: str = "float32",
    shard_bytes: int = 5 * 10**9,
) -> list[str]:
    """Write the directory, which must not exist yet; returns notes for the user."""
    if dtype not in DTYPES:
        raise ConfigError(f"a Hugging Face export has no dtype {dtype!r}; {nearest(dtype, DTYPES)}")
    family = family_of(config)
    full, notes = family.completed(config), family.training_notes(config)
    if full != config:
        notes.append(f"{family.name} always has biases: those that the model does not have are written as zeros")
    unused = list(range(tokenizer.vocab_size, config.vocab_size))
    if unused:
        notes.append(f"the vocabulary has {len(unused)} ids without a token; {GENERATION} prevents sampling them")
    tensors = family.to_hf(full, zero_filled(full, params))
    descriptions = _descriptions(family, full, tokenizer, generation, chat_template, dtype, unused)
    with new_path(folder) as temporary:
        temporary.mkdir()
        num_files = _write_shards(temporary, cast(tensors, dtype), shard_bytes)
        for name, content in descriptions.items():
            write_json(temporary / name, content)
    return [*notes, f"the weights are in {num_files} files"] if num_files > 1 else notes


def zero_filled(config: ModelConfig, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of a model on the CPU, zeros for those it does not have."""
    specs = param_specs(config).values()
    return {spec.name: params[spec.name].float().cpu() if spec.name in params else torch.zeros(spec.shape) for spec in specs}


def cast(tensors: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """In the dtype of the files; a value outside its range is an error, not an infinity."""
    result = {name: x.to(DTYPES[dtype]) for name, x in tensors.items()}
    for name, x in result.items():
        if not torch.isfinite(x).all():
            raise InputError(f"{name} has values that are not finite in {dtype}; bfloat16 and float32 have a larger range")
    return result


@contextmanager
def new_path(path: Path) -> Iterator[Path]:
    """A temporary path for a file or directory, which is renamed to `path` at the end, or removed after a failure."""
    if path.exists():
        raise ConfigError(f"{path} already exists; choose another --out")
    temporary = path.with_name(f".tmp-{path.name}")
    _remove(temporary)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.rename(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    with suppress(OSError):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _write_shards(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int) -> int:
    from safetensors.torch import save_file

    shards: list[dict[str, Tensor]] = [{}]
    for name, x in tensors.items():
        if shards[-1] and sum(y.nbytes for y in shards[-1].values()) + x.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = x
    count = len(shards)
    names = [WEIGHTS] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, {"format": "pt"})
        (folder / name).chmod(folder.stat().st_mode & 0o666)  # safetensors lets only the owner read it
    if count > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        size = sum(x.nbytes for x in tensors.values())
        write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    return count


def _descriptions(
    family: Family,
    config: ModelConfig,
    tokenizer: Tokenizer,
    generation: Generation,
    chat_template: str | None,
    dtype: str,
    unused: list[int],
) -> dict[str, Any]:
    settings = {"architectures": [family.name], "model_type": family.model_type, **family.settings(config)}
    settings |= {**generation.token_ids(), "dtype": dtype, "torch_dtype": dtype}
    special = {
        "bos_token": generation.bos_id,
        "pad_token": generation.pad_id,
        "eos_token": next(iter(generation.eos_ids), None),
    }
    # Only added tokens are given as text: transformers would assign any other text a new id.
    added = {token["id"]: token["content"] for token in tokenizer.spec.get("added_tokens") or []}
    texts = {name: added[i] for name, i in special.items() if i in added}
    return {
        CONFIG: settings,
        GENERATION: generation.settings() | ({"suppress_tokens": unused} if unused else {}),
        TOKENIZER: tokenizer.spec,
        TOKENIZER_CONFIG: {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.max_seq_len,
            "clean_up_tokenization_spaces": False,
            **texts,
            **({"chat_template": chat_template} if chat_template is not None else {}),
        },
    }
