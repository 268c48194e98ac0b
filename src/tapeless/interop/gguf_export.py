"""A model as a GGUF file, for llama.cpp and what is built on it; written by the package `gguf`, which comes from there.

Three things are theirs and not ours. The architecture `llama` turns neighbouring features of a head, ours turn halves: rows of
wq and wk are put in that order (qwen3 turns halves, as ours). A token list without an end is given one by the reader, the id
11, whatever that is: so an end is always named, an id that no text has where the tokenizer has none. And the reader splits
text by a pattern it knows by name, so the tokenizer must be one of ours: byte-level with GPT-2's pattern.
Vectors stay float32, as do learned positions.
Tested by: tests/interop/test_gguf_export.py, acceptance/gguf_files.py."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.config import ModelConfig, nearest
from tapeless.data.bpe import uses_gpt2_split
from tapeless.data.packages import require_package
from tapeless.data.tokenizer import Tokenizer
from tapeless.errors import ConfigError
from tapeless.interop.families import FAMILIES, completed, family_of, training_notes
from tapeless.interop.generation import Generation
from tapeless.interop.hf_export import filled
from tapeless.interop.names import GGUF, renamed

TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
FILE_TYPES = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
BLOCK = 32  # numbers in a block of Q8_0, which lies within a row
NEVER = "ĀĀ Ā"  # a merge whose first half never comes about: a list of merges may not be empty
END = "<|endoftext|>"


class Tokens(NamedTuple):
    """The tokenizer as GGUF lists it, as long as the model's vocabulary."""

    texts: list[str]
    kinds: list[str]
    merges: list[str]
    end: int


def export_gguf(
    path: Path,
    config: ModelConfig,
    params: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    generation: Generation,
    *,
    dtype: str = "float32",
) -> list[str]:
    """Write the file, which must not be there yet; returns what a person should know of it."""
    if dtype not in TYPES:
        raise ConfigError(f"a GGUF export has no dtype {dtype!r}; {nearest(dtype, TYPES)}")
    family = family_of(config)
    _check_supported(family, config)
    if path.exists():
        raise ConfigError(f"{path} is there already; choose another --out")
    full, notes = completed(family, config), training_notes(family, config)
    tokens = listed(tokenizer, generation, config.vocab_size)
    ours = filled(full, params)
    if len(tokens.texts) > config.vocab_size:
        ours = {name: with_mean_row(w) if name in ("embed.w", "head.w") else w for name, w in ours.items()}
        notes.append(
            f"llama.cpp needs a token that ends a text: one was added, id {tokens.end}, as the mean of all others, which is "
            "never the likeliest"
        )
    if tokenizer.vocab_size < config.vocab_size:
        notes.append(f"{config.vocab_size - tokenizer.vocab_size} ids of the vocabulary have no token and are marked unused")
    tensors = renamed(GGUF, family, replace(full, vocab_size=len(tokens.texts)), _reordered(family, full, ours))
    notes += _write(path, family, full, tokens, generation, tensors, dtype)
    return notes


def _check_supported(family: str, config: ModelConfig) -> None:
    """What Hugging Face's class can express and llama.cpp's architecture of the same name cannot."""
    arch, needed = FAMILIES[family].model_type, "gelu" if family == "GPT2LMHeadModel" else "swiglu"
    if config.ffn != needed:
        raise ConfigError(f"llama.cpp's architecture {arch} has ffn = {needed!r}, this model {config.ffn!r}; export it to hf")
    if arch == "qwen3" and config.attn_bias:
        raise ConfigError("llama.cpp's architecture qwen3 has no attention biases, this model has; export it to hf")


def listed(tokenizer: Tokenizer, generation: Generation, vocab_size: int) -> Tokens:
    """Every id with its text and kind, and the id that ends a text: the tokenizer's own, or one that no text has."""
    spec = tokenizer.spec
    _check_known(tokenizer)
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
    end = next(iter(generation.stop), None)
    if end is None:
        end = kinds.index("UNUSED") if "UNUSED" in kinds else vocab_size
        name = END if END not in texts else f"<|end {end}|>"
        texts[end : end + 1], kinds[end : end + 1] = [name], ["CONTROL"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
    return Tokens(texts, kinds, merges or [NEVER], end)


def _check_known(tokenizer: Tokenizer) -> None:
    """llama.cpp splits by a pattern that it knows by name. Bytes without merges come out alike under any."""
    spec = tokenizer.spec
    before, model = spec.get("pre_tokenizer") or {}, spec["model"]
    known = (
        model.get("type") == "BPE" and uses_gpt2_split(spec) and not spec.get("normalizer") and not model.get("ignore_merges")
    )
    if tokenizer.kind != "bytes" and not known:
        raise ConfigError(
            f"llama.cpp knows byte-level BPE with GPT-2's split pattern; this tokenizer ({tokenizer.kind}, "
            f"{model.get('type')}, {before.get('type')}) is another: train with --tokenizer bpe or bytes, or export to hf"
        )


def with_mean_row(w: Tensor) -> Tensor:  # (V, C) -> (V + 1, C)
    """One more id. Its logit is the mean of all logits: at most the largest, and by Jensen's inequality at most 1/V likely."""
    return torch.cat([w, w.mean(0, keepdim=True)])


def _reordered(family: str, config: ModelConfig, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if FAMILIES[family].model_type != "llama":
        return dict(ours)
    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    return {
        name: interleaved(w, heads[name[-1]]) if name.endswith((".wq", ".wk", ".bq", ".bk")) else w for name, w in ours.items()
    }


def interleaved(w: Tensor, num_heads: int) -> Tensor:  # (H*D, ...) both
    """Rows of each head from halves (0 … D/2-1, D/2 … D-1) to pairs (0, D/2, 1, D/2+1, …)."""
    return w.reshape(num_heads, 2, -1, *w.shape[1:]).transpose(1, 2).reshape(w.shape).contiguous()


def _write(
    path: Path,
    family: str,
    config: ModelConfig,
    tokens: Tokens,
    generation: Generation,
    tensors: Mapping[str, Tensor],
    dtype: str,
) -> list[str]:
    gguf = require_package("gguf", "a GGUF export")
    growing = path.with_name(f".tmp-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(growing, FAMILIES[family].model_type)
        _add_metadata(writer, gguf, config, path.stem, len(tokens.texts), dtype)
        _add_tokenizer(writer, gguf, tokens, generation)
        coarse = _add_tensors(writer, gguf, tensors, dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        growing.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        growing.unlink(missing_ok=True)
    if not coarse:
        return []
    return [f"{len(coarse)} matrices have rows that are no multiple of {BLOCK}, such as {coarse[0]}, and are float16"]


def _add_metadata(writer: Any, gguf: ModuleType, c: ModelConfig, name: str, vocab_size: int, dtype: str) -> None:
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[dtype]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(c.max_seq_len)
    writer.add_embedding_length(c.hidden_dim)
    writer.add_block_count(c.num_layers)
    writer.add_feed_forward_length(c.intermediate_dim)
    writer.add_vocab_size(vocab_size)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    if c.norm == "rms":
        writer.add_layer_norm_rms_eps(c.norm_eps)
    else:
        writer.add_layer_norm_eps(c.norm_eps)
    if c.position == "rope":
        writer.add_rope_dimension_count(c.head_dim)
        writer.add_rope_freq_base(c.rope_theta)


def _add_tokenizer(writer: Any, gguf: ModuleType, tokens: Tokens, generation: Generation) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens.texts)
    writer.add_token_types([gguf.TokenType[kind] for kind in tokens.kinds])
    writer.add_token_merges(tokens.merges)
    writer.add_bos_token_id(tokens.end if generation.begin is None else generation.begin)
    writer.add_eos_token_id(tokens.end)
    writer.add_add_bos_token(False)


def _add_tensors(writer: Any, gguf: ModuleType, tensors: Mapping[str, Tensor], dtype: str) -> list[str]:
    """Returns the names of matrices that are float16, because their rows do not divide into blocks."""
    coarse = []
    for name, w in tensors.items():
        kind = TYPES[dtype]
        if w.ndim == 1 or name.startswith("position_embd"):
            kind = "F32"
        elif kind == "Q8_0" and w.shape[-1] % BLOCK:
            kind = "F16"
            coarse.append(name)
        quantized = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(w.numpy(), quantized), raw_dtype=quantized)
    return coarse
