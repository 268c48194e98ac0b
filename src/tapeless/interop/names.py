"""One table of names between our parameters and Hugging Face's, read in both directions.

A row says which of their tensors holds which of ours. GPT-2 keeps q, k and v in one tensor, which ours fill one below the
other, and stores its matrices (in, out), the transpose of ours. `{i}` is the layer. Rows whose tensors a model goes
without (biases, a head of its own) are skipped; a tensor that no row knows is an error, never dropped in silence."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tapeless.config import ModelConfig, nearest
from tapeless.errors import ConfigError, InputError
from tapeless.model.params import ParamSpec, transformer_specs


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


FAMILIES = {"LlamaForCausalLM": _llama(), "Qwen3ForCausalLM": _qwen3(), "GPT2LMHeadModel": _gpt2()}
HEAD = "lm_head.weight"  # in a tied model either absent or the embedding once more


def _rows(family: str, config: ModelConfig) -> tuple[dict[str, ParamSpec], Iterator[Row]]:
    """Our parameters, and the rows that hold them, layer by layer. Every parameter must have its row."""
    if family not in FAMILIES:
        raise ConfigError(f"unknown family {family!r}; {nearest(family, FAMILIES)}")
    specs = {spec.name: spec for spec in transformer_specs(config)}
    rows = {}
    for row in FAMILIES[family]:
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
    result = {}
    for row in _rows(family, config)[1]:
        stacked = torch.cat([ours[name] for name in row.ours])
        result[row.theirs] = stacked.t().contiguous() if row.transposed else stacked
    return result


def from_hugging_face(family: str, config: ModelConfig, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names and in our layout, each checked against the shape the configuration asks for."""
    specs, rows = _rows(family, config)
    left = dict(theirs)
    if config.tie_embeddings:
        left.pop(HEAD, None)
    result = {}
    for row in rows:
        if row.theirs not in left:
            raise InputError(f"{row.theirs} is missing; the configuration asks for {', '.join(row.ours)}")
        stacked = left.pop(row.theirs)
        stacked = stacked.t() if row.transposed else stacked
        shapes = [specs[name].shape for name in row.ours]
        expected = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        if tuple(stacked.shape) != expected:
            raise InputError(f"{row.theirs} has the shape {tuple(stacked.shape)} in our layout, expected {expected}")
        parts = stacked.split([shape[0] for shape in shapes])
        result.update({name: part.contiguous() for name, part in zip(row.ours, parts, strict=True)})
    if left:
        raise InputError(f"{min(left)} has no place in a model of this configuration, nor have {len(left) - 1} other tensors")
    return result
