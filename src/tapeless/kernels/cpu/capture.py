"""Capture of a pass through a model as a list of calls, which are replayed without the Python between them.

A step of a small model is a hundred calls, and computing their arguments (shapes, views, buffers) takes a third as long as the
work itself. While a pass is captured it runs as usual, and every call that computes is stored with its arguments: kernels and
matmuls by `launch`, everything else by torch's dispatcher. What numpy computes between calls, and values that Python reads from
a tensor through numpy, are not captured: ops must do neither.
A capture owns the buffers that it writes. Buffers that were lent several times during the pass are reused in the same order.
Tested by: tests/kernels/cpu/test_capture.py."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from tapeless.kernels.dispatch import DispatchObserver, computes, writes
from tapeless.kernels.private_api import tree_map
from tapeless.kernels.workspace import LARGEST_CAPTURE, NUMPY, Workspace
from tapeless.ops.op import CapturedCalls

Result = TypeVar("Result")


class LaunchObserver(Protocol):
    def launched(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Called instead of function(*args, **options)."""


class _Current(threading.local):
    observer: LaunchObserver | None = None


_current = _Current()


def launch(function: Callable[..., Any], *args: Any, **options: Any) -> None:
    """function(*args, **options), which writes its results into its arguments: a replay ignores what it returns."""
    if _current.observer is None:
        function(*args, **options)
    else:
        _current.observer.launched(function, args, options)


@contextmanager
def launches_to(observer: LaunchObserver) -> Iterator[None]:
    before, _current.observer = _current.observer, observer
    try:
        yield
    finally:
        _current.observer = before


class CallCapture(DispatchObserver):
    """Stores every call that computes, until one cannot be replayed."""

    def __init__(self, ws: Workspace):
        super().__init__()
        self.calls: list[Callable[[], Any]] = []
        self.obstacle: str | None = None
        self.nbytes = 0  # of all blocks that the calls write, and of tensors that torch allocates
        self._ws, self._launching = ws, False
        self._blocks: dict[int, Any] = {}  # of the workspace, by address

    def launched(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._add(function, *args, **options)
        self._launching = True
        try:
            function(*args, **options)
        finally:
            self._launching = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        options = options or {}
        result = function(*args, **options)
        if self._launching or not computes(function):
            return result
        if not isinstance(result, Tensor) or torch.Tag.nondeterministic_seeded in function.tags:
            self._give_up(f"{function.name()} may return another result the next time")
        elif writes(function):
            self._add(function, *args, **options)
        else:
            self.nbytes += result.nbytes
            self._add(_write_again, result, function, *args, **options)
        return result

    def _add(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        if self.obstacle is not None:
            return
        self.calls.append(partial(function, *tree_map(self._owned, args), **tree_map(self._owned, options)))
        if self.nbytes > LARGEST_CAPTURE:
            self._give_up(f"it would own more than {LARGEST_CAPTURE / 2**20:,.0f} MiB")

    def _give_up(self, obstacle: str) -> None:
        self.obstacle = obstacle
        self.calls.clear()

    def _owned(self, x: Any) -> Any:
        """The same memory without a reference to the lent tensor: the block returns to the workspace during the pass."""
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
            self._give_up(f"a buffer is viewed as {x.dtype}")
            return x
        if first not in self._blocks:
            self._blocks[first] = block
            self.nbytes += block.nbytes
        view = np.ndarray(x.shape, dtype, block, address - first, strides)
        return torch.from_numpy(view).view(x.dtype) if isinstance(x, Tensor) else view

    def done(self) -> CapturedCalls | str:
        """The captured calls, or the reason why there are none. A block that is still referenced may be lent to another tensor
        later, so a replay must not write it."""
        if any(self._ws.lent_at(first)[0] is not None for first in self._blocks):
            self._give_up("one of its buffers is still in use")
        if self.obstacle is not None:
            return self.obstacle
        self._ws.release_idle()
        return CapturedCalls(self.calls, self.nbytes)


def _write_again(result: Tensor, function: Callable[..., Tensor], *args: Any, **options: Any) -> None:
    result.copy_(function(*args, **options))


def capture_with(ws: Workspace) -> Callable[[Callable[[], Result]], tuple[Result, CapturedCalls | str]]:
    """OpSet.capture of a set that takes its buffers from this workspace."""

    def capture(run: Callable[[], Result]) -> tuple[Result, CapturedCalls | str]:
        with CallCapture(ws) as observer, launches_to(observer):
            result = run()
        return result, observer.done()

    return capture
