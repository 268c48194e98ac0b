"""The decoder of models that draw tokens where the logits are: a step is one CUDA graph for each batch size, and nothing in it
waits for the host.

What a slot needs for its next token is on the device, so a step starts with the tokens that the one before it drew. The host
sends which slots take part and a number in [0, 1) for each, and reads the tokens of a step while the next one runs. Batches are
filled up to a power of two with rows of a slot of their own, from which nothing may be drawn.
Prompts run through the same graphs' kernels, up to ROWS tokens at a time, of whatever sequences start together: a token has the
same bits, alone or in a prompt. The last token of a prompt is a step like any other. Where the ops capture nothing, the same
calls run one by one.
Tested by: tests/generate/test_device_decoder.py, and on a GPU tests/kernels/triton/test_cuda.py."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tapeless.errors import NonFiniteError
from tapeless.generate.decoder import Request
from tapeless.generate.sampler import uniform
from tapeless.ops.numerics import HostCopy
from tapeless.ops.op import SlotState

ROWS = 64  # most of a batch


class _Start(NamedTuple):
    """A sequence that has begun and is not queued yet."""

    slot: int
    request: Request
    ids: list[int]  # the whole text
    first: int  # where its window starts
    reused: int


class _Batch(NamedTuple):
    """A function of rows, for one number of them."""

    inputs: Tensor  # (columns, R) int64, read by the calls
    result: Tensor | None  # written by the calls
    calls: Sequence[Callable[[], Any]]


class DeviceDecoder:
    """See Decoder. model: one whose ops have a `decoder` for it, and a `sampler`."""

    lag, reuse, reuse_generated = 1, 1, True

    def __init__(self, model: Any, slots: int, capacity: int):
        self.capacity = capacity
        self._model, self._device, self._idle_slot = model, model.device, slots
        self._kv_cache = model.kv_cache(slots + 1, capacity)
        V, on = model.config.vocab_size, {"device": model.device}
        self._state = SlotState(
            numbers=torch.ones(slots + 1, 4, dtype=torch.float64, **on),
            limits=torch.zeros(slots + 1, 2, dtype=torch.int32, **on),  # of the idle slot no id may be drawn
            seen=torch.zeros(slots + 1, V, dtype=torch.int8, **on),
            tokens=torch.zeros(slots + 1, dtype=torch.int64, **on),
            positions=torch.zeros(slots + 1, dtype=torch.int64, **on),
        )
        self._seen: set[tuple[str, int]] = set()  # functions and numbers of rows that ran, and whose kernels are compiled
        self._batches: dict[tuple[str, int], _Batch] = {}
        self._requests: dict[int, Request] = {}
        self._lengths: dict[int, int] = {}  # of the texts, with the tokens that are queued
        self._starts: dict[int, _Start] = {}
        self._queue: deque[list[tuple[list[int], HostCopy, int]]] = deque()  # slots, and where their tokens are in a batch

    def start(self, slot: int, request: Request, ids: list[int], first: int, reused: int) -> None:
        """Starts are queued together, when the first of them is needed."""
        if slot in self._starts:
            self._run_starts()
        self._starts[slot] = _Start(slot, request, ids.copy(), first, reused)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        if not self._starts.keys().isdisjoint((source, target)):
            self._run_starts()
        self._kv_cache.copy_prefix(source, target, length)

    def advance(self, slots: list[int]) -> None:
        self._run_starts()
        self._model.store.refresh(only_if_counted=True)  # not within a graph
        with self._current_device():
            self._queue.append(self._draw(slots))

    def collect(self) -> list[tuple[int, int]]:
        self._run_starts()
        found: list[tuple[int, int]] = []
        for slots, drawn, first in self._queue.popleft():
            found += zip(slots, drawn.read()[first : first + len(slots)], strict=True)
        for slot, token in found:
            if token < 0:
                self._model.store.raise_if_non_finite()
                raise NonFiniteError(f"the logits of the sequence in slot {slot} are not finite; cannot sample")
        return found

    def _run_starts(self) -> None:
        starts, self._starts = list(self._starts.values()), {}
        if not starts:
            return
        self._model.store.refresh(only_if_counted=True)
        self._write_state(starts)
        rows = [
            (token, s.slot, position)
            for s in starts
            for position, token in enumerate(s.ids[s.first : -1])
            if position >= s.reused
        ]
        with self._current_device():
            for i in range(0, len(rows), ROWS):
                self._run(self._prompt, np.array(rows[i : i + ROWS]).T)
            for slots, drawn, first in self._draw([s.slot for s in starts]):
                self._queue.extend([([slot], drawn, first + i)] for i, slot in enumerate(slots))

    def _current_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _write_state(self, starts: list[_Start]) -> None:
        slots = self._sent(np.array([s.slot for s in starts]))
        requests, V = [s.request for s in starts], self._model.config.vocab_size
        samplings = [request.sampling for request in requests]
        numbers = np.array([(s.temperature, s.top_p, s.min_p, s.repetition_penalty) for s in samplings], np.float64)
        limits = np.array([(min(request.sampling.top_k, V), request.vocab_size) for request in requests], np.int32)
        self._state.numbers[slots] = self._sent(numbers)
        self._state.limits[slots] = self._sent(limits)
        self._state.tokens[slots] = self._sent(np.array([s.ids[-1] for s in starts]))
        self._state.positions[slots] = self._sent(np.array([len(s.ids) - s.first - 1 for s in starts]))
        for slot, request, ids, _, _ in starts:
            self._requests[slot], self._lengths[slot] = request, len(ids)
            if request.sampling.repetition_penalty != 1:
                self._state.seen[slot].zero_().index_fill_(0, self._sent(np.array(ids)), 1)

    def _draw(self, slots: list[int]) -> list[tuple[list[int], HostCopy, int]]:
        """One more token of each slot, in batches."""
        batches = []
        for i in range(0, len(slots), ROWS):
            some = slots[i : i + ROWS]
            u = np.array([self._uniform(slot) for slot in some])
            tokens = self._run(self._step, np.stack([u.view(np.int64), some]))
            assert tokens is not None
            batches.append((some, HostCopy(tokens), 0))
        return batches

    def _uniform(self, slot: int) -> float:
        """Of the next token of a slot, which is from now on queued."""
        request, position = self._requests[slot], self._lengths[slot]
        self._lengths[slot] += 1
        return uniform(request.sampling.seed, request.sample, position) if request.sampling.temperature else 0.0

    def _step(self, inputs: Tensor) -> Tensor:  # (2, R): u, slots -> (R,)
        u, slots = inputs[0].view(torch.float64), inputs[1]
        tokens, positions = (x.index_select(0, slots) for x in (self._state.tokens, self._state.positions))
        logits = self._model.decode(tokens, slots, positions, self._kv_cache, check=False)
        return self._model.ops.sampler(logits, slots, u, self._state)

    def _prompt(self, inputs: Tensor) -> None:  # (3, R): tokens, slots, positions
        self._model.decode(*inputs, self._kv_cache, check=False)

    def _run(self, run: Callable[[Tensor], Tensor | None], rows: np.ndarray) -> Tensor | None:
        """run(rows); from the second time on as a graph. rows: (columns, n) int64, the slots second."""
        columns, n = rows.shape
        R = 1 << (n - 1).bit_length()
        filled, key = np.zeros((columns, R), np.int64), (run.__name__, R)
        filled[1] = self._idle_slot
        if key in self._seen and key not in self._batches and self._model.ops.capture is not None:
            inputs = self._sent(filled)  # rows of the idle slot: what runs when the graph is made leaves nothing
            result, captured = self._model.ops.capture(lambda: run(inputs))
            self._batches[key] = _Batch(inputs, result, captured.calls)
        filled[:, :n] = rows
        batch = self._batches.get(key)
        if batch is None:
            self._seen.add(key)
            return run(self._sent(filled))
        batch.inputs.copy_(self._pinned(filled), non_blocking=True)
        for call in batch.calls:
            call()
        return batch.result

    def _sent(self, array: np.ndarray) -> Tensor:
        return self._pinned(array).to(self._device, non_blocking=True)

    def _pinned(self, array: np.ndarray) -> Tensor:
        """A copy to a GPU does not wait for the kernels before it if it is from pinned memory."""
        x = torch.from_numpy(np.ascontiguousarray(array))
        return x.pin_memory() if self._device.type == "cuda" else x
