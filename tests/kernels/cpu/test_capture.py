"""Captured calls are replayed in their order and on their memory: launches and calls of torch."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from tapeless.kernels.cpu.capture import capture_with, launch
from tapeless.kernels.cpu.jit import array
from tapeless.kernels.workspace import Workspace
from tapeless.ops.op import CapturedCalls

N = 10_000  # elements: a buffer of the workspace


def double(x: np.ndarray, y: np.ndarray) -> None:
    y[...] = 2 * x


def replayed(run: Callable[[], Any], ws: Workspace | None = None) -> Callable[[], None]:
    _, captured = capture_with(ws or Workspace())(run)
    assert isinstance(captured, CapturedCalls)

    def replay() -> None:
        for call in captured.calls:
            call()

    return replay


def test_calls_are_replayed_in_their_order_on_the_same_memory():
    x, y, ws = torch.arange(float(N)), torch.zeros(N), Workspace()

    def run() -> None:
        half = ws.empty((N,), torch.float32)
        launch(double, array(x), array(half))
        half[1:].add_(1)
        launch(torch.add, half, x.flip(0), out=y)

    replay = replayed(run, ws)
    expected = 2 * x + 1
    expected[0] -= 1
    assert torch.equal(y, expected + x.flip(0))
    x.mul_(3).sub_(1)
    y.zero_()
    replay()
    expected = 2 * x + 1
    expected[0] -= 1
    assert torch.equal(y, expected + x.flip(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_of_lent_buffers(dtype: torch.dtype):
    """Slices, transposes and arrays of slices; the buffers are returned during the capture, and written in turn."""
    x, found, ws = torch.randn(200, 200).to(dtype), torch.zeros(80, 200, dtype=dtype), Workspace()

    def run() -> None:
        places = []
        for k in range(3):
            a = ws.empty((200, 200), dtype)
            a.copy_(x)
            part = a[20:].t()[:, :80]
            launch(np.copyto, array(a[30:31]), array(a[:1]))
            part.mul_(k + 1)
            found.add_(part.t())
            places.append(a.data_ptr())
            del a, part
        assert len(set(places)) == 1

    replay = replayed(run, ws)
    assert ws.allocated == 0
    once = found.clone()
    found.zero_()
    x.neg_()
    replay()
    assert torch.equal(found, -once)


def test_a_capture_owns_its_buffers():
    ws, x = Workspace(), torch.ones(N)
    seen: list[int] = []

    def run() -> Tensor:
        buffer = ws.empty((N,), torch.float32)
        seen.append(buffer.data_ptr())
        launch(double, array(x), array(buffer))
        return buffer.sum()

    replay = replayed(run, ws)
    others = [ws.empty((N,), torch.float32).fill_(7) for _ in range(3)]
    assert seen[0] not in [other.data_ptr() for other in others]
    replay()
    assert all((other == 7).all() for other in others)


def test_what_torch_returns_is_written_where_it_was():
    x, found = torch.ones(3), []

    def run() -> None:
        y = x * 2 + torch.cat([x, x])[:3]
        found.append(y.sum())

    replay = replayed(run)
    assert found[0] == 9
    x.fill_(5)
    replay()
    assert found[0] == 45


@pytest.mark.parametrize(
    "run",
    [lambda: torch.ones(3).sum().item(), lambda: torch.rand(3), lambda: bool(torch.ones(1)), lambda: torch.ones(3).max(0)],
    ids=["item", "rand", "bool", "max"],
)
def test_a_call_whose_result_may_change_is_not_captured(run: Callable[[], Any]):
    _, obstacle = capture_with(Workspace())(run)
    assert isinstance(obstacle, str)
    assert "may return another result" in obstacle


def test_an_error_ends_the_capture():
    def fails() -> None:
        launch(double, 1, 2)

    with pytest.raises(TypeError):
        capture_with(Workspace())(fails)
    calls: list[int] = []
    launch(calls.append, 1)
    assert calls == [1]


def test_another_thread_is_not_captured():
    x, y = np.ones(3), np.zeros(3)

    def run() -> None:
        thread = threading.Thread(target=lambda: launch(double, x, y))
        thread.start()
        thread.join()

    replay = replayed(run)
    assert (y == 2).all()
    y[:] = 0
    replay()
    assert (y == 0).all()


def test_a_buffer_that_outlives_the_pass_voids_the_capture():
    ws, x, kept = Workspace(), torch.ones(N), []

    def run() -> None:
        kept.append(ws.empty((N,), torch.float32))
        launch(double, array(x), array(kept[0]))

    _, obstacle = capture_with(ws)(run)
    assert obstacle == "one of its buffers is still in use"
    assert ws.allocated > 0


@pytest.mark.parametrize("by", ["workspace", "torch"])
def test_what_would_take_too_much_is_not_captured(by: str, monkeypatch: pytest.MonkeyPatch):
    """And it holds nothing while the pass continues."""
    monkeypatch.setitem(capture_with.__globals__, "LARGEST_CAPTURE", 7 * N)
    ws, x, found = Workspace(), torch.ones(N), []

    def run() -> None:
        for k in range(3):
            buffer = ws.empty((N + k,), torch.float32) if by == "workspace" else x + 1
            buffer.fill_(k)
            found.append(weakref.ref(buffer))
        found.append(buffer.sum())

    _, obstacle = capture_with(ws)(run)
    assert isinstance(obstacle, str)
    assert "it would own more than" in obstacle
    assert found.pop() == 2 * (N + 2 if by == "workspace" else N)
    assert all(place() is None for place in found)


def test_the_bytes_of_a_capture():
    ws, x = Workspace(), torch.ones(N)

    def run() -> None:
        for _ in range(3):
            launch(double, array(x), array(ws.empty((N,), torch.float32)))
        x.sum()

    _, captured = capture_with(ws)(run)
    assert isinstance(captured, CapturedCalls)
    assert captured.nbytes == 4 * N + 4
    assert ws.allocated == 0
