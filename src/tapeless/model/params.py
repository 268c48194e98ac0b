"""Parameters: a table of what there is, one flat buffer that holds it, and a twin of that buffer for gradients.

Everything that treats parameters alike (optimizers, clipping, reduction over ranks, checkpoints) works on the flat buffers;
everything that tells them apart reads the table. Matrices that one product reads together lie side by side, so the fused
matrix is a view.
Tested by: tests/model/test_params.py."""

from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from tapeless.config import ModelConfig, nearest
from tapeless.errors import ConfigError, NonFiniteError, OrderError
from tapeless.ops.ffn_gate import GATED

ALIGNMENT = 64  # elements: two cache lines of bfloat16, four of float32; vector loads want whole lines

# dtype name -> (of the parameters and their gradients, of the computation)
DTYPES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.float32, torch.bfloat16),
    "fp8": (torch.float32, torch.bfloat16),  # bfloat16 with products of eight bits inside
    "float64": (torch.float64, torch.float64),
    "complex128": (torch.complex128, torch.complex128),
}


class ParamSpec(NamedTuple):
    name: str
    shape: tuple[int, ...]
    init: str  # embedding | linear | residual (a linear map that ends a sublayer) | adapter (its first half) | ones | zeros
    decay: bool  # whether weight decay applies: matrices yes, norms and biases no
    shard_axis: int | None  # the axis along which tensor parallelism cuts it; None: every rank holds all of it
    joined: bool = False  # follows the parameter before it without a gap: products read the two as one matrix


def transformer_specs(c: ModelConfig) -> list[ParamSpec]:
    """The table of a transformer, in the order of the flat buffer."""
    V, C, F, D = c.vocab_size, c.hidden_dim, c.intermediate_dim, c.head_dim
    HD, GD = c.num_heads * D, c.num_kv_heads * D

    def norm(name: str, width: int) -> list[ParamSpec]:
        bias = [ParamSpec(f"{name}.b", (width,), "zeros", False, None)] if c.norm_bias else []
        return [ParamSpec(f"{name}.w", (width,), "ones", False, None), *bias]  # mutant: norm-specs

    def matrices(parts: list[tuple[str, int]], columns: int) -> list[ParamSpec]:
        return [ParamSpec(n, (rows, columns), "linear", True, 0, joined=i > 0) for i, (n, rows) in enumerate(parts)]

    def biases(parts: list[tuple[str, int]]) -> list[ParamSpec]:
        return [ParamSpec(n, (rows,), "zeros", False, 0, joined=i > 0) for i, (n, rows) in enumerate(parts)]

    specs = [ParamSpec("embed.w", (V, C), "embedding", True, 0)]
    if c.position == "learned":
        specs.append(ParamSpec("pos.w", (c.max_seq_len, C), "embedding", True, None))
    for i in range(c.num_layers):
        attn, ffn = f"blocks.{i}.attn", f"blocks.{i}.ffn"
        specs += norm(f"{attn}_norm", C)
        specs += matrices([(f"{attn}.wq", HD), (f"{attn}.wk", GD), (f"{attn}.wv", GD)], C)
        if c.attn_bias:
            specs += biases([(f"{attn}.bq", HD), (f"{attn}.bk", GD), (f"{attn}.bv", GD)])
        if c.qk_norm:
            specs += [ParamSpec(f"{attn}.{x}_norm.w", (D,), "ones", False, None) for x in "qk"]
        specs.append(ParamSpec(f"{attn}.wo", (C, HD), "residual", True, 1))
        if c.attn_bias:
            specs.append(ParamSpec(f"{attn}.bo", (C,), "zeros", False, None))
        specs += norm(f"{ffn}_norm", C)
        up = ["gate", "up"] if c.ffn in GATED else ["up"]
        specs += matrices([(f"{ffn}.w_{x}", F) for x in up], C)
        if c.ffn_bias:
            specs += biases([(f"{ffn}.b_{x}", F) for x in up])
        specs.append(ParamSpec(f"{ffn}.w_down", (C, F), "residual", True, 1))
        if c.ffn_bias:
            specs.append(ParamSpec(f"{ffn}.b_down", (C,), "zeros", False, None))
    specs += norm("final_norm", C)
    if not c.tie_embeddings:
        specs.append(ParamSpec("head.w", (V, C), "linear", True, 0))
    return specs


def count_params(specs: Iterable[ParamSpec]) -> int:
    return sum(torch.Size(spec.shape).numel() for spec in specs)


class FlatLayout:
    """Where each parameter lies in the flat buffer."""

    def __init__(self, specs: Iterable[ParamSpec]):
        self.specs = {spec.name: spec for spec in specs}
        self.spans: dict[str, tuple[int, int]] = {}  # name -> (offset, numel)
        end = 0
        for spec in self.specs.values():
            if not spec.joined:
                end = -(-end // ALIGNMENT) * ALIGNMENT
            size = torch.Size(spec.shape).numel()
            self.spans[spec.name] = (end, size)
            end += size
        self.numel = end  # with the gaps, which stay zero

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return {name: flat[o : o + n].view(self.specs[name].shape) for name, (o, n) in self.spans.items()}

    def joined(self, flat: Tensor, *names: str) -> Tensor | None:
        """Neighbours as one matrix (or one bias), stacked along the first axis; None where the model has none of them."""
        present = [name for name in names if name in self.spans]
        if not present:
            return None
        start = self.spans[present[0]][0]
        end = sum(self.spans[present[-1]])
        if sum(self.spans[name][1] for name in present) != end - start:
            raise ConfigError(f"{', '.join(present)} are not neighbours in the flat buffer")
        return flat[start:end].view(-1, *self.specs[present[0]].shape[1:])

    def all_but(self, flat: Tensor, names: Collection[str]) -> list[Tensor]:
        """The stretches of the flat buffer that hold none of the named parameters, gaps included."""
        stretches, end = [], 0
        for name, (offset, size) in self.spans.items():
            if name in names:
                stretches.append(flat[end:offset])
                end = offset + size
        return [stretch for stretch in (*stretches, flat[end:]) if len(stretch)]

    def parts(self, flat: Tensor) -> dict[str, Tensor]:
        """The flat buffer cut where a backward completes one stretch after the other: embed, blocks.0 …, head."""
        starts: dict[str, int] = {}
        for name, (offset, _) in self.spans.items():
            top = name.split(".")
            part = {"embed": "embed", "pos": "embed", "blocks": ".".join(top[:2])}.get(top[0], "head")
            starts.setdefault(part, offset)
        ends = [*list(starts.values())[1:], self.numel]
        return {part: flat[start:end] for (part, start), end in zip(starts.items(), ends, strict=True)}


class ParamStore:
    """The flat buffers of a model: parameters, gradients, and the copy that products read where their dtype differs."""

    def __init__(self, layout: FlatLayout, device: torch.device, dtype: str, *, trained: FlatLayout | None = None):
        """trained: the beginning of `layout`, where not all of it has gradients (trained.py)."""
        if dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {dtype!r}; {nearest(dtype, DTYPES)}")
        master, compute = DTYPES[dtype]
        self.layout, self.trained = layout, trained or layout
        with torch.inference_mode(False):  # such tensors would not count the writes into them
            self.flat = torch.zeros(layout.numel, dtype=master, device=device)
            self.compute_flat = self.flat if compute == master else torch.empty_like(self.flat, dtype=compute)
        self.params: Mapping[str, Tensor] = MappingProxyType(layout.views(self.flat))
        self._copied_version, self._seen_version, self._trusted = -1, -1, False

    @cached_property
    def flat_grads(self) -> Tensor:  # (m,) of what trains
        """Made when they are first asked for: who only evaluates or generates has none."""
        with torch.inference_mode(False):
            return torch.zeros_like(self.flat[: self.trained.numel])

    @cached_property
    def grads(self) -> Mapping[str, Tensor]:
        return MappingProxyType(self.trained.views(self.flat_grads))

    @property
    def version(self) -> int:
        """How often the parameters were written: torch counts the in-place writes, through whichever view they came."""
        return self.flat._version

    def expect_version(self, version: int) -> None:
        """A backward is of the parameters its forward saw; with others it would be the gradient of nothing."""
        if version != self.version:
            raise OrderError("parameters were written between forward and backward; run forward again")

    def refresh(self, *, only_if_counted: bool = False) -> None:
        """Bring the compute copy up to date. Some writers, torch's fused optimizers among them, go around the count of
        writes, so the copy is made anew each time, unless the last writer made it itself (`copied`), or the caller decodes
        token by token and says so."""
        if self.compute_flat is self.flat or (self.version == self._copied_version and (only_if_counted or self._trusted)):
            return
        self.compute_flat.copy_(self.flat)
        self._copied_version = self._seen_version = self.version
        self._trusted = False

    @property
    def copy(self) -> Tensor | None:  # (m,) of what trains
        """The compute copy, where there is one, for an optimizer that writes it along with the parameters."""
        self._seen_version = self.version
        return None if self.compute_flat is self.flat else self.compute_flat[: self.trained.numel]

    def copied(self) -> None:
        """The optimizer has written `copy` too, and counts its writes. From here on only counted writes are seen: one that goes
        around the count, a fused optimizer of torch's among them, must not be mixed with this. What does not train was not in
        the optimizer's hands: if anyone wrote it since the last refresh, the copy is stale there."""
        if self.trained is self.layout or self._seen_version == self._copied_version:
            self._copied_version, self._trusted = self.version, True

    def raise_if_non_finite(self) -> None:
        """Name the first parameter that holds NaN or infinity, where there is one."""
        for name, w in self.params.items():
            bad = (~torch.isfinite(w)).nonzero()
            if len(bad):
                where = bad[0].tolist()
                raise NonFiniteError(
                    f"{name} {tuple(w.shape)} holds {len(bad)} non-finite values, the first at {where}: "
                    f"{w[tuple(where)].item()}; "
                    "load a checkpoint from before they appeared"
                )
