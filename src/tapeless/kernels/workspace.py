"""Buffers that are used again and again instead of being allocated anew in every step.

A fresh allocation of some megabytes is mapped and zeroed page by page on first touch, which costs as much as a pass over it.
A workspace lends blocks: a block comes back by itself when the last tensor that sees it is gone, so nobody has to say so, and
a tensor that somebody keeps is never written over. It belongs to one model, and like it to one thread of Python at a time.
Tested by: tests/kernels/test_workspace.py."""

import math
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

SMALL = 2**15  # bytes; below, the allocator of the C library is as good
LAZY = 4
LARGEST_RECORDING = 2**26  # bytes; a pass that takes more is so long that Python is nothing of it, and shares its buffers
NUMPY = {torch.float32: np.float32, torch.bfloat16: np.uint16}


class Workspace:
    def __init__(self) -> None:
        self._free: dict[Any, list[Any]] = defaultdict(list)  # by dtype and number of elements
        self._lent: dict[int, Any] = {}
        self._scratch: dict[str, np.ndarray] = {}  # flat, as large as was ever asked for
        self.allocated = 0  # bytes of all blocks, lent out or not

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of whatever the block last held."""
        numel = math.prod(shape)
        if numel * dtype.itemsize < SMALL:
            return torch.empty(shape, dtype=dtype)
        free = self._free[dtype, numel]
        if free:
            block = free.pop()
        else:
            self._make_room()
            block = self._new_block(numel, dtype)
            self.allocated += block.nbytes
        return self._lend(block, free, shape, dtype)

    def _new_block(self, numel: int, dtype: torch.dtype) -> Any:
        return np.empty(numel, NUMPY[dtype])

    def _lend(self, block: Any, free: list[Any], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        lent = block.reshape(shape)  # held by torch's storage and by as_array below: both end with the last tensor
        ticket = weakref.ref(lent, self._take_back)
        self._lent[id(ticket)] = ticket, free, block
        tensor = torch.from_numpy(lent)
        tensor = tensor.view(dtype) if dtype == torch.bfloat16 else tensor
        tensor.as_array = tensor.data_ptr(), lent  # type: ignore[attr-defined]  # see cpu/jit.py
        return tensor

    def lent_at(self, address: int) -> tuple[Any, int]:
        """The block that is lent out and holds this address, and where it begins; None where there is none."""
        for _, _, block in self._lent.values():
            first = block.__array_interface__["data"][0]
            if first <= address < first + block.nbytes:
                return block, first
        return None, 0

    def give_away(self) -> int:
        """What lies idle is no longer the workspace's: it is gone, unless somebody else holds it. Returned are its bytes."""
        idle = self._idle()
        for free in self._free.values():
            free.clear()
        self.allocated -= idle
        return idle

    def scratch(self, name: str, *shape: int) -> np.ndarray:
        """An array for the duration of one kernel: the same memory for the same name, never lent out."""
        numel = math.prod(shape)
        flat = self._scratch.get(name)
        if flat is None or len(flat) < numel:
            self.allocated += 4 * (numel - (0 if flat is None else len(flat)))
            flat = self._scratch[name] = np.empty(numel, np.float32)
        return flat[:numel].reshape(shape)

    def _make_room(self) -> None:
        """Where shapes keep changing, blocks of sizes that are not asked for any more would pile up: when what lies idle is
        more than LAZY times what is in use, all of it goes."""
        idle = self._idle()
        if idle > LAZY * max(self.allocated - idle, SMALL):
            self.give_away()

    def _idle(self) -> int:  # bytes
        return sum(block.nbytes for free in self._free.values() for block in free)

    def _take_back(self, ticket: Any) -> None:
        _, free, block = self._lent.pop(id(ticket))
        free.append(block)
