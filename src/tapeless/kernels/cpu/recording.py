"""A pass through a model as a list of calls: made once, then repeated without the Python between them.

A step of a small model is a hundred calls, and finding out their arguments (shapes, views, buffers) takes as long as a third of
the work itself. While a pass is recorded it runs as ever, and every call that computes is kept with its arguments: kernels and
products by `launch`, whatever else torch computes by torch's own dispatcher. What is computed in numpy between calls would be
seen by nobody, so that ops compute nothing there.
The buffers that a recording writes are its own from then on; those lent out in turn during the pass are written in turn again.
Judged by: tests/kernels/cpu/test_recording.py."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tapeless.kernels.dispatch import Onlooker
from tapeless.kernels.workspace import NUMPY, Workspace, worth_recording

Result = TypeVar("Result")
Recording = list[Callable[[], Any]]

PROMOTED = torch.ops.aten.promote_types.default  # of dtypes; no tensor is in it


class _Current(threading.local):
    recorder: "Recorder | None" = None


_current = _Current()


def launch(function: Callable[..., Result], *args: Any, **options: Any) -> Result:
    """function(*args, **options), seen by whoever records. What it computes it writes into its arguments: what it returns will
    not be looked at again."""
    if _current.recorder is None:
        return function(*args, **options)
    return _current.recorder.launched(function, args, options)


class Recorder(Onlooker):
    def __init__(self, ws: Workspace):
        super().__init__()
        self.calls: Recording = []
        self.obstacle: str | None = None
        self._ws, self._launching = ws, False

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
        if self._launching or function.is_view or "empty" in function.name() or function is PROMOTED:
            return result
        if not isinstance(result, Tensor) or torch.Tag.nondeterministic_seeded in function.tags:
            self.obstacle = f"{function.name()} may answer otherwise the next time"
        elif function._schema.is_mutable:
            self._add(function, *args, **options)
        else:
            self._add(_again, result, function, *args, **options)
        return result

    def _add(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        self.calls.append(partial(function, *tree_map(self._unlent, args), **tree_map(self._unlent, options)))

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
        seen = np.ndarray(x.shape, dtype, block, address - first, strides)
        return torch.from_numpy(seen).view(x.dtype) if isinstance(x, Tensor) else seen


def _again(result: Tensor, function: Callable[..., Tensor], *args: Any, **options: Any) -> None:
    result.copy_(function(*args, **options))


def recorder(ws: Workspace) -> Callable[[Callable[[], Result]], tuple[Result, Recording | None, str | None]]:
    def record(run: Callable[[], Result]) -> tuple[Result, Recording | None, str | None]:
        """What run() returns, and the recording of it, or why there is none."""
        if not worth_recording(ws):
            return run(), None, f"its buffers have {ws.allocated / 2**20:,.0f} MiB, more than are worth keeping apart"
        with Recorder(ws) as recording:
            result = run()
        if recording.obstacle is not None:
            return result, None, recording.obstacle
        ws.give_away()
        return result, recording.calls, None

    return record
