"""Parameters: their specifications, one flat buffer that holds them, and a second one for their gradients.

Whatever treats all parameters alike (optimizers, clipping, reduction over ranks, checkpoints) works on the flat buffers;
whatever distinguishes them reads the specifications. Matrices that one matmul reads together are adjacent, so that the fused
matrix is a view.
Tested by: tests/model/test_params.py."""

from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from tapeless.config import nearest
from tapeless.errors import ConfigError, NonFiniteError, OrderError

ALIGNMENT = 64  # elements: two cache lines of bfloat16, four of float32; vector loads want whole lines

# dtype name -> (of the parameters and their gradients, of the computation)
DTYPES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.float32, torch.bfloat16),
    "fp8": (torch.float32, torch.bfloat16),  # bfloat16 with 8-bit matmuls inside
    "float64": (torch.float64, torch.float64),
    "complex128": (torch.complex128, torch.complex128),
}


class ParamSpec(NamedTuple):
    name: str
    shape: tuple[int, ...]
    init: str  # embedding | linear | residual (a linear layer that ends a sublayer) | adapter (its first half) | ones | zeros
    decay: bool  # whether weight decay applies: matrices yes, norms and biases no
    shard_axis: int | None  # the axis along which tensor parallelism splits it; None: every rank holds all of it
    joined: bool = False  # follows the previous parameter without a gap: one matmul reads both as one matrix
    # Whether it is the weight of a linear op of the kernel set (ops.linear, ffn_down, linear_cross_entropy): it can have a LoRA
    # adapter, counts in FLOPs, and its gradient can be written without having been zeroed (OpSet.non_accumulating).
    is_linear: bool = False


def count_params(specs: Iterable[ParamSpec]) -> int:
    return sum(torch.Size(spec.shape).numel() for spec in specs)


class FlatLayout:
    """The position of each parameter in the flat buffer."""

    def __init__(self, specs: Iterable[ParamSpec]):
        self.specs: dict[str, ParamSpec] = {}
        for spec in specs:
            if spec.name in self.specs:
                raise ConfigError(f"two parameters are named {spec.name}; rename one, or the kind of its sublayer")
            self.specs[spec.name] = spec
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

    def view(self, flat: Tensor, name: str) -> Tensor | None:
        """None if the layout does not have it."""
        if name not in self.spans:
            return None
        offset, size = self.spans[name]
        return flat[offset : offset + size].view(self.specs[name].shape)

    def joined(self, flat: Tensor, *names: str) -> Tensor | None:
        """Adjacent parameters as one matrix (or one bias), stacked along the first axis; None if there are none of them."""
        present = [name for name in names if name in self.spans]
        if not present:
            return None
        start = self.spans[present[0]][0]
        end = sum(self.spans[present[-1]])
        if sum(self.spans[name][1] for name in present) != end - start:
            raise ConfigError(f"{', '.join(present)} are not adjacent in the flat buffer")
        return flat[start:end].view(-1, *self.specs[present[0]].shape[1:])

    def all_but(self, flat: Tensor, names: Collection[str]) -> list[Tensor]:
        """The spans of the flat buffer that hold none of the named parameters, gaps included."""
        spans, end = [], 0
        for name, (offset, size) in self.spans.items():
            if name in names:
                spans.append(flat[end:offset])
                end = offset + size
        return [span for span in (*spans, flat[end:]) if len(span)]

    def parts(self, flat: Tensor) -> dict[str, Tensor]:
        """The flat buffer in the spans that backward completes one after the other: embed, blocks.0 …, head."""
        starts: dict[str, int] = {}
        for name, (offset, _) in self.spans.items():
            top = name.split(".")
            part = {"embed": "embed", "pos": "embed", "blocks": ".".join(top[:2])}.get(top[0], "head")
            starts.setdefault(part, offset)
        ends = [*list(starts.values())[1:], self.numel]
        return {part: flat[start:end] for (part, start), end in zip(starts.items(), ends, strict=True)}


class ParamStore:
    """The flat buffers of a model: parameters, gradients, and the copy that matmuls read if their dtype differs."""

    def __init__(self, layout: FlatLayout, device: torch.device, dtype: str, *, trained: FlatLayout | None = None):
        """trained: the first part of `layout`, if not all of it has gradients (trained.py)."""
        if dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {dtype!r}; {nearest(dtype, DTYPES)}")
        master, compute = DTYPES[dtype]
        self.layout, self.trained = layout, trained or layout
        with torch.inference_mode(False):  # inference tensors have no version counter
            self.flat = torch.zeros(layout.numel, dtype=master, device=device)
            self.compute_flat = self.flat if compute == master else torch.empty_like(self.flat, dtype=compute)
        self.params: Mapping[str, Tensor] = MappingProxyType(layout.views(self.flat))
        self._copied_version, self._seen_version, self._trusted = -1, -1, False

    @cached_property
    def flat_grads(self) -> Tensor:  # (m,) of what trains
        """Allocated on first use: evaluation and generation need none."""
        with torch.inference_mode(False):
            return torch.zeros_like(self.flat[: self.trained.numel])

    @cached_property
    def grads(self) -> Mapping[str, Tensor]:
        return MappingProxyType(self.trained.views(self.flat_grads))

    @property
    def version(self) -> int:
        """How often the parameters were written: torch counts in-place writes through any view."""
        return self.flat._version

    def expect_version(self, version: int) -> None:
        """A backward must see the parameters its forward saw."""
        if version != self.version:
            raise OrderError("parameters were written between forward and backward; run forward again")

    def refresh(self, *, only_if_counted: bool = False) -> None:
        """Update the compute copy. Some writers, torch's fused optimizers among them, bypass the version counter, so the copy
        is made every time, unless the last writer updated it itself (`mark_copied`), or the caller decodes, has made the
        copy before, and trusts the counter since (only_if_counted)."""
        if self.compute_flat is self.flat or (self.version == self._copied_version and (only_if_counted or self._trusted)):
            return
        self.compute_flat.copy_(self.flat)
        self._copied_version = self._seen_version = self.version
        self._trusted = False

    @property
    def copy(self) -> Tensor | None:  # (m,) of what trains
        """The compute copy, if there is one, for an optimizer that writes it together with the parameters."""
        self._seen_version = self.version
        return None if self.compute_flat is self.flat else self.compute_flat[: self.trained.numel]

    def mark_copied(self) -> None:
        """Called after an optimizer has also written `copy`. From then on only counted writes are noticed, so an optimizer that
        bypasses the version counter must not be mixed with this one. The optimizer does not write frozen parameters: if someone
        else did since the last refresh, the copy is stale there and is not trusted."""
        if self.trained is self.layout or self._seen_version == self._copied_version:
            self._copied_version, self._trusted = self.version, True

    def raise_if_non_finite(self) -> None:
        """Raise with the name of the first parameter that holds NaN or infinity, if any."""
        if torch.isfinite(self.flat.sum()):  # one pass; if finite numbers overflow it, the search below finds nothing
            return
        for name, w in self.params.items():
            bad = (~torch.isfinite(w)).nonzero()
            if len(bad):
                where = bad[0].tolist()
                raise NonFiniteError(
                    f"{name} {tuple(w.shape)} holds {len(bad)} non-finite values, the first at {where}: "
                    f"{w[tuple(where)].item()}; "
                    "load a checkpoint from before they appeared"
                )


class Parametrized:
    """What every model has: parameters and gradients by name."""

    store: ParamStore

    @property
    def params(self) -> Mapping[str, Tensor]:
        """The parameters by name, as views of one flat buffer; they may be written at any time between two passes."""
        return self.store.params

    @property
    def grads(self) -> Mapping[str, Tensor]:
        """The gradients of what is trained, likewise; backward adds to them."""
        return self.store.grads

    @property
    def num_params(self) -> int:
        """Elements of all parameters, frozen ones included."""
        return count_params(self.store.layout.specs.values())

    def zero_grads(self) -> None:
        """Set all gradients to zero, as before the first backward of a step."""
        self.store.flat_grads.zero_()
