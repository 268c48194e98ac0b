"""The bytes of saved activations by name, known before a run: a forward on torch's meta device, where tensors have shapes and
no memory. Inputs (tokens, targets, documents) are the caller's and do not count.
Tested by: tests/model/test_recompute.py."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tapeless.config import ModelConfig, nearest
from tapeless.errors import ConfigError
from tapeless.kernels.dry import environment_restored
from tapeless.kernels.private_api import storage_id
from tapeless.model.params import DTYPES
from tapeless.model.transformer import Transformer
from tapeless.ops.op import OpSet
from tapeless.ops.reference import REFERENCE


@environment_restored()
def saved_bytes(
    config: ModelConfig, batch_size: int, seq_len: int, recompute: str, dtype: str, *, ops: OpSet = REFERENCE
) -> dict[str, int]:
    """Name -> bytes that model.forward saves of (batch_size, seq_len) tokens, for a Transformer of this config with these
    recompute and dtype. ops: a set that runs on the meta device."""
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; {nearest(dtype, DTYPES)}")
    period = min(len(config.block_pattern), config.num_layers)  # its blocks save what all others do
    model = Transformer(
        replace(config, num_layers=period, dropout=0.0),
        device="meta",
        dtype="bfloat16" if dtype == "fp8" else dtype,
        ops="reference",
        recompute=recompute,
        initialized=False,
    )
    model.ops = ops
    tokens = torch.empty(1, seq_len, dtype=torch.int64, device="meta")
    n, saved = model._trunk(tokens, model._context(None), keep=True)
    _, head = model.ops.linear_cross_entropy.forward(n, tokens, n[0, :1], num_targets=1)  # saves the same for any vocabulary
    one_row = named_bytes(saved._replace(head=head), "", {_place(tokens)})
    found = [(name, batch_size * size) for name, size in one_row]
    for i, block in enumerate(model.blocks):  # blocks.0.branches.1.sublayer.up -> blocks.0.ffn.up
        for j, sublayer in enumerate(block.sublayers):
            for part, name in (("sublayer", sublayer.name), ("norm", f"{sublayer.name}_norm")):
                path = f"blocks.{i}.branches.{j}.{part}."
                found = [(key.replace(path, f"{name}.", 1), size) for key, size in found]
    of_layer = [[item for item in found if item[0].startswith(f"blocks.{i}.")] for i in range(period)]
    layers = {
        name.replace(f"blocks.{i % period}.", f"blocks.{i}.", 1): size
        for i in range(config.num_layers)
        for name, size in of_layer[i % period]
    }
    return layers | {name: size for name, size in found if not name.startswith("blocks.")}


def named_bytes(saved: Any, name: str, counted: set[tuple[int, int]]) -> Iterator[tuple[str, int]]:
    """Every tensor in nested records, once, with the path to it. counted: the places of tensors, extended."""
    if isinstance(saved, Tensor):
        if _place(saved) not in counted:
            counted.add(_place(saved))
            yield name, saved.nbytes
    elif isinstance(saved, tuple | list | dict):
        parts = (
            saved.items() if isinstance(saved, dict) else zip(getattr(saved, "_fields", range(len(saved))), saved, strict=True)
        )
        for key, part in parts:
            yield from named_bytes(part, f"{name}.{key}" if name else str(key), counted)


def _place(x: Tensor) -> tuple[int, int]:
    """Where its memory begins: kernels keep several tensors in one storage."""
    return storage_id(x.untyped_storage()), int(x.storage_offset())
