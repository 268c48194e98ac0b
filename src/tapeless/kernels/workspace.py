"""Buffers that are reused in every step instead of being allocated anew.

A fresh allocation of some megabytes is mapped and zeroed page by page on first touch, which costs as much as a pass over it.
A workspace lends blocks. A block returns by itself when the last tensor that sees it is freed, so callers release nothing, and
a tensor that is still referenced is never overwritten. A workspace belongs to one model, and is used by one Python thread at a
time.
Tested by: tests/kernels/test_workspace.py."""

import math
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

SMALL = 2**15  # bytes; for smaller tensors the C library's allocator is as fast
MAX_IDLE_RATIO = 4
LARGEST_CAPTURE = 2**26  # bytes; a pass that takes more runs so long that Python's share is nothing, and shares its buffers
NUMPY = {torch.float32: np.float32, torch.bfloat16: np.uint16}


class Workspace:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self._free: dict[Any, list[np.ndarray]] = defaultdict(list)  # by dtype and number of elements
        self._lent: dict[int, Any] = {}
        self._scratch: dict[str, np.ndarray] = {}  # flat, as large as the largest request so far
        self.allocated = 0  # bytes of all blocks, lent or not

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor."""
        numel = math.prod(shape)
        if numel * dtype.itemsize < SMALL:
            return torch.empty(shape, dtype=dtype, device=self.device)
        free = self._free[dtype, numel]
        if free:
            block = free.pop()
        else:
            self._trim()
            block = self._new_block(numel, dtype)
            self.allocated += block.nbytes
        return self._lend(block, free, shape, dtype)

    def _new_block(self, numel: int, dtype: torch.dtype) -> np.ndarray:  # (numel,)
        return np.empty(numel, NUMPY[dtype])

    def _lend(self, block: np.ndarray, free: list[np.ndarray], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        lent = block.reshape(shape)  # referenced by torch's storage and by as_array below: both end with the last tensor
        ticket = weakref.ref(lent, self._take_back)
        self._lent[id(ticket)] = ticket, free, block
        tensor = torch.from_numpy(lent)
        tensor = tensor.view(dtype) if dtype == torch.bfloat16 else tensor
        tensor.as_array = tensor.data_ptr(), lent  # type: ignore[attr-defined]  # see cpu/jit.py
        return tensor

    def lent_at(self, address: int) -> tuple[Any, int]:
        """The lent block that contains this address, and the block's own address; (None, 0) if there is none."""
        for _, _, block in self._lent.values():
            first = block.__array_interface__["data"][0]
            if first <= address < first + block.nbytes:
                return block, first
        return None, 0

    def release_idle(self) -> int:
        """Forget every idle block: its memory is freed unless another object references it. Returns the bytes."""
        idle = self._idle()
        for free in self._free.values():
            free.clear()
        self.allocated -= idle
        return idle

    def scratch(self, name: str, *shape: int) -> np.ndarray:
        """A float32 array for the duration of one kernel: the same memory for the same name, never lent."""
        numel = math.prod(shape)
        flat = self._scratch.get(name)
        if flat is None or len(flat) < numel:
            self.allocated += 4 * (numel - (0 if flat is None else len(flat)))
            flat = self._scratch[name] = self._new_block(numel, torch.float32)
        return flat[:numel].reshape(shape)

    def _trim(self) -> None:
        """If shapes keep changing, blocks of sizes that are no longer requested pile up: release all idle blocks once they are
        more than MAX_IDLE_RATIO times the memory in use."""
        idle = self._idle()
        if idle > MAX_IDLE_RATIO * max(self.allocated - idle, SMALL):
            self.release_idle()

    def _idle(self) -> int:  # bytes
        return sum(block.nbytes for free in self._free.values() for block in free)

    def _take_back(self, ticket: Any) -> None:
        _, free, block = self._lent.pop(id(ticket))
        free.append(block)
