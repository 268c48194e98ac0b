"""Export to a GGUF file for llama.cpp and what is built on it, written with its own package `gguf`.

- A reader assigns an end-of-text token to a file that does not name one: the id 11, whatever it is. So one is always named: the
  model's, or an id without a token, or a new id.
- The reader splits text by a pattern it knows by name, so the tokenizer must be byte-level with GPT-2's pattern.
- Vectors and learned positions stay float32.
Tested by: tests/interop/test_gguf_export.py, acceptance/gguf_files.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tapeless.config import ModelConfig, nearest
from tapeless.data.bpe import uses_gpt2_split
from tapeless.data.packages import require_package
from tapeless.data.tokenizer import END_OF_TEXT, ByteTokenizer, Tokenizer
from tapeless.errors import ConfigError
from tapeless.interop.families import family_of
from tapeless.interop.family import GGUF_COMMON, Family
from tapeless.interop.generation import Generation
from tapeless.interop.hf_export import new_path, zero_filled

TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
BLOCK = 32  # elements that share a scale in Q8_0; rows are split into blocks
UNREACHABLE_MERGE = "ĀĀ Ā"  # no merge produces its first half; the list of merges must not be empty


class Tokens(NamedTuple):
    """The tokenizer's lists in GGUF, as long as the model's vocabulary."""

    texts: list[str]
    kinds: list[str]
    merges: list[str]
    bos_id: int
    eos_ids: list[int]


def export_gguf(
    path: Path,
    config: ModelConfig,
    params: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    generation: Generation,
    *,
    chat_template: str | None = None,
    dtype: str = "float32",
) -> list[str]:
    """Write the file, which must not exist yet; returns notes for the user."""
    if dtype not in TYPES:
        raise ConfigError(f"a GGUF export has no dtype {dtype!r}; {nearest(dtype, TYPES)}")
    family = family_of(config)
    require_gguf(family, config, tokenizer)
    full, notes = family.completed(config), family.training_notes(config)
    tokens = token_lists(tokenizer, generation, config.vocab_size)
    params = zero_filled(full, params)
    if len(tokens.texts) > config.vocab_size:
        params = {name: with_mean_row(w) if name in ("embed.w", "head.w") else w for name, w in params.items()}
        notes.append(
            f"llama.cpp requires an end-of-text token: id {tokens.eos_ids[0]} was added; its row is the mean of all others, so "
            "it is never the most likely"
        )
    if tokenizer.vocab_size < config.vocab_size:
        notes.append(f"{config.vocab_size - tokenizer.vocab_size} ids of the vocabulary have no token and are marked unused")
    return notes + _write(path, family, full, tokens, family.to_gguf(full, params), chat_template, dtype)


def require_gguf(family: Family, config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raise with the reasons why llama.cpp cannot run this model with this tokenizer."""
    misfits = family.gguf_misfits(config)
    if misfits:
        raise ConfigError(f"llama.cpp's architecture {family.gguf_architecture}: {'; '.join(misfits)}; export it to hf")
    _check_tokenizer(tokenizer)


def token_lists(tokenizer: Tokenizer, generation: Generation, vocab_size: int) -> Tokens:
    """Every id with its text and kind, and the id that ends a text: the model's own, or one that no text contains."""
    spec = tokenizer.spec
    _check_tokenizer(tokenizer)
    symbols = {i: text for text, i in spec["model"]["vocab"].items()}
    added = {token["id"]: token for token in spec.get("added_tokens") or []}
    texts, kinds = [], []
    for i in range(vocab_size):
        if i in added:
            texts.append(added[i]["content"])
            kinds.append("CONTROL" if added[i].get("special") else "USER_DEFINED")
        else:
            texts.append(symbols.get(i, f"[unused {i}]"))
            kinds.append("NORMAL" if i in symbols else "UNUSED")
    ends = list(generation.eos_ids)
    if not ends:
        end = kinds.index("UNUSED") if "UNUSED" in kinds else vocab_size
        name = END_OF_TEXT if END_OF_TEXT not in texts else f"<|end {end}|>"
        texts[end : end + 1], kinds[end : end + 1] = [name], ["CONTROL"]
        ends = [end]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
    bos = ends[0] if generation.bos_id is None else generation.bos_id
    return Tokens(texts, kinds, merges or [UNREACHABLE_MERGE], bos, ends)


def _check_tokenizer(tokenizer: Tokenizer) -> None:
    """llama.cpp splits by a pattern that it knows by name. Bytes without merges are the same under any pattern."""
    spec = tokenizer.spec
    before, model = spec.get("pre_tokenizer") or {}, spec["model"]
    known = (
        model.get("type") == "BPE" and uses_gpt2_split(spec) and not spec.get("normalizer") and not model.get("ignore_merges")
    )
    if not isinstance(tokenizer, ByteTokenizer) and not known:
        raise ConfigError(
            f"a GGUF export supports byte-level BPE with GPT-2's split pattern, not this tokenizer ({tokenizer.kind}, "
            f"{model.get('type')}, {before.get('type')}); train with --tokenizer bpe, bytes or bytes+chat, or export to hf"
        )


def with_mean_row(w: Tensor) -> Tensor:  # (V, C) -> (V + 1, C)
    """One more id. Its logit is the mean of all logits, hence not the largest, and its probability at most 1/V (Jensen)."""
    return torch.cat([w, w.mean(0, keepdim=True)])


def _write(
    path: Path,
    family: Family,
    config: ModelConfig,
    tokens: Tokens,
    tensors: Mapping[str, Tensor],
    chat_template: str | None,
    dtype: str,
) -> list[str]:
    gguf, architecture = require_package("gguf", "a GGUF export"), family.gguf_architecture
    half = []  # matrices that are float16 because their rows do not divide into blocks
    with new_path(path) as temporary:
        writer = gguf.GGUFWriter(temporary, architecture)
        writer.add_name(path.stem)
        writer.add_file_type(gguf.LlamaFileType["ALL_F32" if dtype == "float32" else f"MOSTLY_{TYPES[dtype]}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_vocab_size(len(tokens.texts))
        for key, field in {**GGUF_COMMON, **family.gguf_keys}.items():
            value = getattr(config, field)
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(f"{architecture}.{key}", value)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens.texts)
        writer.add_token_types([gguf.TokenType[kind] for kind in tokens.kinds])
        writer.add_token_merges(tokens.merges)
        writer.add_bos_token_id(tokens.bos_id)
        add_ends = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)  # a reader stops at each
        for add_end, i in zip(add_ends, tokens.eos_ids, strict=False):
            add_end(i)
        if chat_template is not None:
            writer.add_chat_template(chat_template)
        writer.add_add_bos_token(False)
        for name, w in tensors.items():
            kind = TYPES[dtype]
            if w.ndim == 1 or name.startswith("position_embd"):
                kind = "F32"
            elif kind == "Q8_0" and w.shape[-1] % BLOCK:
                kind = "F16"
                half.append(name)
            quantized = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(w.numpy(), quantized), raw_dtype=quantized)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    if not half:
        return []
    return [f"{len(half)} matrices are float16, since their rows are not a multiple of {BLOCK}, such as {half[0]}"]
