"""The decoding cache: what each sublayer remembers of the tokens already processed (keys and values of attention), so that
decoding runs each token through the model once.

The forward is the same as in training; a sublayer finds its own tensors in `ctx.cache(self)`.
Tested by: tests/model/test_decode.py."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from copy import copy

import torch
from torch import Tensor

from tapeless.errors import InputError

Shapes = Mapping[str, tuple[int, ...]]  # name -> shape, the batch first


class KVCache:
    def __init__(
        self,
        shapes: Callable[[int], Mapping[str, Shapes]],
        batch_size: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        """shapes: of every sublayer that has a cache, by its name, for a given capacity."""
        self.batch_size, self.capacity = batch_size, capacity
        self.length = 0  # tokens held
        equal: dict[tuple[str, tuple[int, ...], int | None], list[str]] = defaultdict(list)
        longer = shapes(capacity + 1)  # differs in the axis of the positions
        for sublayer, tensors in shapes(capacity).items():
            for name, shape in tensors.items():
                axes = [i for i, size in enumerate(longer[sublayer][name]) if size != shape[i]]
                equal[name, tuple(shape), axes[0] if axes else None].append(sublayer)
        # Tensors of one name and shape are layers of one: a decoder that runs all layers in one call reads them so.
        self.stacked: Mapping[str, list[Tensor]] = defaultdict(list)  # name -> [(layers, *shape), ...]
        self._of: Mapping[str, dict[str, Tensor]] = defaultdict(dict)
        self._by_position: list[Tensor] = []  # the same memory as (positions, layers, batch, ...)
        self.has_prefixes = True  # whether everything remembered belongs to a position, so that a prefix can be kept
        for (name, shape, axis), sublayers in equal.items():
            stack = torch.empty(len(sublayers), *shape, device=device, dtype=dtype)
            self.stacked[name].append(stack)
            for sublayer, layer in zip(sublayers, stack, strict=True):
                self._of[sublayer][name] = layer
            if axis is None:
                self.has_prefixes = False
            else:
                self._by_position.append(stack.movedim(axis + 1, 0))

    def of(self, sublayer: str) -> dict[str, Tensor]:
        return self._of[sublayer]

    def row(self, i: int) -> "KVCache":
        """Sequence i alone, in the same memory, with a length of its own."""
        one = copy(self)
        one.batch_size, one.length = 1, 0
        one.stacked = {name: [stack[:, i : i + 1] for stack in stacks] for name, stacks in self.stacked.items()}
        one._of = {sublayer: {name: x[i : i + 1] for name, x in of.items()} for sublayer, of in self._of.items()}
        return one

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Make the first `length` tokens of one sequence those of another."""
        for x in self._by_position:
            x[:length, :, target] = x[:length, :, source]

    def expect_rows(
        self,
        slots: Tensor,  # (R,) int64
        positions: Tensor,  # (R,) int64
    ) -> None:
        """Raise unless each row is another sequence and has room for one more token."""
        rows, at = slots.tolist(), positions.tolist()
        if len(set(rows)) < len(rows) or not all(0 <= row < self.batch_size for row in rows):
            raise InputError(f"slots are {rows}; expected distinct rows of a kv_cache of {self.batch_size}")
        if not all(0 <= position < self.capacity for position in at):
            raise InputError(f"positions are {at}; expected 0 to {self.capacity - 1}, the capacity of the kv_cache")

    def expect(self, batch_size: int, new: int) -> None:
        """Raise unless `new` more tokens of this batch fit."""
        if batch_size != self.batch_size:
            raise InputError(f"kv_cache was made for batches of {self.batch_size}, got {batch_size}")
        if self.length + new > self.capacity:
            raise InputError(f"kv_cache holds {self.length} of {self.capacity} tokens, no room for {new} more")
