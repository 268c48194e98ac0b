"""One table of names between our parameters and Hugging Face's, read in both directions; and GGUF's, which are only written.

A row says which of their tensors holds which of ours. GPT-2 keeps q, k and v in one tensor, which ours fill one below the
other, and stores its matrices (in, out), the transpose of ours. `{i}` is the layer. Rows whose tensors a model goes
without (biases, a head of its own) are skipped; a tensor that no row knows is an error, never dropped in silence.
Tested by: tests/interop/test_names.py."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tapeless.config import ModelConfig, nearest
from tapeless.errors import ConfigError, InputError
from tapeless.model.params import ParamSpec
from tapeless.model.transformer import transformer_specs


class Row(NamedTuple):
    theirs: str
    ours: tuple[str, ...]  # stacked along the first axis
    transposed: bool = False


def _llama() -> list[Row]:
    block, layer = "blocks.{i}.", "model.layers.{i}."
    rows = [
        Row("model.embed_tokens.weight", ("embed.w",)),
        Row(f"{layer}input_layernorm.weight", (f"{block}attn_norm.w",)),
        Row(f"{layer}post_attention_layernorm.weight", (f"{block}ffn_norm.w",)),
    ]
    for theirs, ours in (("weight", "w"), ("bias", "b")):
        rows += [Row(f"{layer}self_attn.{x}_proj.{theirs}", (f"{block}attn.{ours}{x}",)) for x in "qkvo"]
        rows += [Row(f"{layer}mlp.{x}_proj.{theirs}", (f"{block}ffn.{ours}_{x}",)) for x in ("gate", "up", "down")]
    return [*rows, Row("model.norm.weight", ("final_norm.w",)), Row("lm_head.weight", ("head.w",))]


def _qwen3() -> list[Row]:
    norms = [Row(f"model.layers.{{i}}.self_attn.{x}_norm.weight", (f"blocks.{{i}}.attn.{x}_norm.w",)) for x in "qk"]
    return [*_llama(), *norms]


def _gpt2() -> list[Row]:
    block, layer = "blocks.{i}.", "transformer.h.{i}."
    rows = [Row("transformer.wte.weight", ("embed.w",)), Row("transformer.wpe.weight", ("pos.w",))]
    for theirs, ours in (("weight", "w"), ("bias", "b")):
        matrix = ours == "w"
        rows += [
            Row(f"{layer}ln_1.{theirs}", (f"{block}attn_norm.{ours}",)),
            Row(f"{layer}attn.c_attn.{theirs}", tuple(f"{block}attn.{ours}{x}" for x in "qkv"), transposed=matrix),
            Row(f"{layer}attn.c_proj.{theirs}", (f"{block}attn.{ours}o",), transposed=matrix),
            Row(f"{layer}ln_2.{theirs}", (f"{block}ffn_norm.{ours}",)),
            Row(f"{layer}mlp.c_fc.{theirs}", (f"{block}ffn.{ours}_up",), transposed=matrix),
            Row(f"{layer}mlp.c_proj.{theirs}", (f"{block}ffn.{ours}_down",), transposed=matrix),
            Row(f"transformer.ln_f.{theirs}", (f"final_norm.{ours}",)),
        ]
    return [*rows, Row("lm_head.weight", ("head.w",))]


def _gguf(*, fused: bool) -> list[Row]:
    """One column for every architecture: GGUF's names are the same in all of them, but that GPT-2's q, k and v are one."""
    rows = [Row("token_embd.weight", ("embed.w",)), Row("position_embd.weight", ("pos.w",)), Row("output.weight", ("head.w",))]
    for theirs, ours in (("weight", "w"), ("bias", "b")):
        block, layer = "blocks.{i}.", "blk.{i}."
        rows += [Row(f"{layer}{x}_norm.{theirs}", (f"{block}{x}_norm.{ours}",)) for x in ("attn", "ffn")]
        if fused:
            rows.append(Row(f"{layer}attn_qkv.{theirs}", tuple(f"{block}attn.{ours}{x}" for x in "qkv")))
        else:
            rows += [Row(f"{layer}attn_{x}.{theirs}", (f"{block}attn.{ours}{x}",)) for x in "qkv"]
        rows += [
            Row(f"{layer}attn_output.{theirs}", (f"{block}attn.{ours}o",)),
            *(Row(f"{layer}ffn_{x}.{theirs}", (f"{block}ffn.{ours}_{x}",)) for x in ("gate", "up", "down")),
            *(Row(f"{layer}attn_{x}_norm.{theirs}", (f"{block}attn.{x}_norm.{ours}",)) for x in "qk"),
            Row(f"output_norm.{theirs}", (f"final_norm.{ours}",)),
        ]
    return rows


FAMILIES = {"LlamaForCausalLM": _llama(), "Qwen3ForCausalLM": _qwen3(), "GPT2LMHeadModel": _gpt2()}
GGUF = {"LlamaForCausalLM": _gguf(fused=False), "Qwen3ForCausalLM": _gguf(fused=False), "GPT2LMHeadModel": _gguf(fused=True)}
HEAD = "lm_head.weight"  # in a tied model either absent or the embedding once more
SHOWN = 5  # tensors that do not fit, in an error

# The trunk's name, which files saved without the head leave out; and constants that older files carry along.
TRUNKS = {"LlamaForCausalLM": "model.", "Qwen3ForCausalLM": "model.", "GPT2LMHeadModel": "transformer."}
CONSTANTS = re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def _rows(table: dict[str, list[Row]], family: str, config: ModelConfig) -> tuple[dict[str, ParamSpec], Iterator[Row]]:
    """Our parameters, and the rows that hold them, layer by layer. Every parameter must have its row."""
    if family not in table:
        raise ConfigError(f"unknown family {family!r}; {nearest(family, table)}")
    specs = {spec.name: spec for spec in transformer_specs(config)}
    rows = {}
    for row in table[family]:
        for i in range(config.num_layers):
            ours = tuple(name.format(i=i) for name in row.ours)
            if ours[0] in specs:
                rows[row.theirs.format(i=i)] = row._replace(theirs=row.theirs.format(i=i), ours=ours)
    homeless = specs.keys() - {name for row in rows.values() for name in row.ours}
    if homeless:
        raise ConfigError(f"{family} has no place for {min(homeless)}; another family may, or change the model")
    return specs, iter(rows.values())


def to_hugging_face(family: str, config: ModelConfig, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors (parameters or gradients) under their names and in their layout; a tied head is left out."""
    return renamed(FAMILIES, family, config, ours)


def renamed(table: dict[str, list[Row]], family: str, config: ModelConfig, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    result = {}
    for row in _rows(table, family, config)[1]:
        stacked = torch.cat([ours[name] for name in row.ours])
        result[row.theirs] = stacked.t().contiguous() if row.transposed else stacked
    return result


def full_names(family: str, names: Mapping[str, object]) -> dict[str, str]:
    """Their names as the table spells them -> as they stand in the file, which may be of the trunk alone."""
    trunk = TRUNKS[family]
    bare = HEAD not in names and not any(name.startswith(trunk) for name in names)
    return {f"{trunk}{name}" if bare else name: name for name in names}


def their_shapes(family: str, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """What a model of this configuration consists of, under their names and in their layout."""
    specs, rows = _rows(FAMILIES, family, config)
    shapes = {}
    for row in rows:
        parts = [specs[name].shape for name in row.ours]
        shape = (sum(part[0] for part in parts), *parts[0][1:])
        shapes[row.theirs] = shape[::-1] if row.transposed else shape
    return shapes


def check_shapes(family: str, config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Every tensor there, of its shape, and no other: said of the shapes alone, before a single value is read."""
    expected = their_shapes(family, config)
    wrong = [f"{name} {shape} is missing" for name, shape in expected.items() if name not in found]
    wrong += [f"{n} is {found[n]}, expected {s}" for n, s in expected.items() if n in found and found[n] != s]
    spare = {HEAD} if config.tie_embeddings else set()
    wrong += [
        f"{name!r:.120} {shape} has no place here" for name, shape in found.items() if name not in expected.keys() | spare
    ]
    if wrong:
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise InputError(f"the tensors do not fit a {family} of this configuration: {'; '.join(wrong[:SHOWN])}{more}")


def from_hugging_face(family: str, config: ModelConfig, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names and in our layout; each is asked for once, so that a file can be read as it goes."""
    specs, rows = _rows(FAMILIES, family, config)
    result = {}
    for row in rows:
        stacked = theirs[row.theirs]
        stacked = stacked.t() if row.transposed else stacked
        parts = stacked.split([specs[name].shape[0] for name in row.ours])
        result.update({name: part.contiguous() for name, part in zip(row.ours, parts, strict=True)})
    return result
