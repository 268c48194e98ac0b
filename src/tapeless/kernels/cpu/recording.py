"""A pass through a model as a list of calls: made once, then repeated without the Python between them.

A step of a small model is a hundred calls, and finding out their arguments (shapes, views, buffers) takes as long as a third of
the work itself. While a pass is recorded it runs as ever, and every call that computes is kept with its arguments: kernels and
products by `launch`, whatever else torch computes by torch's own dispatcher. What numpy computes between calls, and what Python
reads out of a tensor by way of numpy, nobody sees: ops must do neither.
The buffers that a recording writes are its own from then on; those lent out in turn during the pass are written in turn again.
Tested by: tests/kernels/cpu/test_recording.py."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tapeless.kernels.dispatch import DispatchObserver, computes, writes
from tapeless.kernels.workspace import LARGEST_RECORDING, NUMPY, Workspace
from tapeless.ops.op import Recording

Result = TypeVar("Result")


class _Current(threading.local):
    recorder: "Recorder | None" = None


_current = _Current()


def launch(function: Callable[..., Result], *args: Any, **options: Any) -> Result:
    """function(*args, **options), seen by whoever records. What it computes it writes into its arguments: what it returns will
    not be looked at again."""
    if _current.recorder is None:
        return function(*args, **options)
    return _current.recorder.launched(function, args, options)


class Recorder(DispatchObserver):
    """While it lasts, keeps every call that computes, until there is an obstacle to it."""

    def __init__(self, ws: Workspace):
        super().__init__()
        self.calls: list[Callable[[], Any]] = []
        self.obstacle: str | None = None
        self.nbytes = 0  # of all blocks that the calls write, and of results that torch makes
        self._ws, self._launching = ws, False
        self._blocks: dict[int, Any] = {}  # of the workspace, by where they begin

    def __enter__(self) -> "Recorder":
        _current.recorder = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _current.recorder = None
        super().__exit__(*error)

    def launched(self, function: Callable[..., Result], args: tuple[Any, ...], options: dict[str, Any]) -> Result:
        self._add(function, *args, **options)
        self._launching = True
        try:
            return function(*args, **options)
        finally:
            self._launching = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        options = options or {}
        result = function(*args, **options)
        if self._launching or not computes(function):
            return result
        if not isinstance(result, Tensor) or torch.Tag.nondeterministic_seeded in function.tags:
            self._give_up(f"{function.name()} may answer otherwise the next time")
        elif writes(function):
            self._add(function, *args, **options)
        else:
            self.nbytes += result.nbytes
            self._add(_again, result, function, *args, **options)
        return result

    def _add(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        if self.obstacle is not None:
            return
        self.calls.append(partial(function, *tree_map(self._unlent, args), **tree_map(self._unlent, options)))
        if self.nbytes > LARGEST_RECORDING:
            self._give_up(f"it would have more than {LARGEST_RECORDING / 2**20:,.0f} MiB for itself")

    def _give_up(self, obstacle: str) -> None:
        self.obstacle = obstacle
        self.calls.clear()

    def _unlent(self, x: Any) -> Any:
        """The same memory, seen so that its block comes back to the workspace when the pass itself is done with it."""
        if isinstance(x, np.ndarray):
            address, dtype, strides = x.__array_interface__["data"][0], x.dtype, x.strides
        elif isinstance(x, Tensor):
            address, dtype, strides = x.data_ptr(), NUMPY.get(x.dtype), tuple(x.element_size() * n for n in x.stride())
        else:
            return x
        block, first = self._ws.lent_at(address)
        if block is None:
            return x
        if dtype is None:
            self._give_up(f"a buffer is seen as {x.dtype}")
            return x
        if first not in self._blocks:
            self._blocks[first] = block
            self.nbytes += block.nbytes
        seen = np.ndarray(x.shape, dtype, block, address - first, strides)
        return torch.from_numpy(seen).view(x.dtype) if isinstance(x, Tensor) else seen

    def done(self) -> Recording | str:
        """What was recorded, or why nothing was. A block that somebody still has will be lent to others after him."""
        if any(self._ws.lent_at(first)[0] is not None for first in self._blocks):
            self._give_up("a buffer of it is still in use")
        if self.obstacle is not None:
            return self.obstacle
        self._ws.give_away()
        return Recording(self.calls, self.nbytes)


def _again(result: Tensor, function: Callable[..., Tensor], *args: Any, **options: Any) -> None:
    result.copy_(function(*args, **options))


def recording_with(ws: Workspace) -> Callable[[Callable[[], Result]], tuple[Result, Recording | str]]:
    """OpSet.record of a set that takes its buffers from this workspace."""

    def record(run: Callable[[], Result]) -> tuple[Result, Recording | str]:
        with Recorder(ws) as recorder:
            result = run()
        return result, recorder.done()

    return record
