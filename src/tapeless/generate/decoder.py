"""What the engine runs a model through: sequences in slots, each one token longer per call, drawn where the logits are.

A decoder works through a queue: `start` and `advance` add to it and return at once if the decoder can, `collect` waits for the
oldest. On the host each runs when it is called. A row of logits depends on its own sequence alone, bit for bit: not on the
other sequences, its slot, or what of its prefix was reused. Hence a prompt is always run in the same passes: CHUNK tokens each,
from the start of its window.
Tested by: tests/generate/test_decoder.py, tests/generate/test_engine.py."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tapeless.config import Sampling
from tapeless.errors import NonFiniteError
from tapeless.generate.sampler import sample

# Tokens of a prompt per pass, and the unit of reuse. 500 tokens take llama-small in bfloat16 43 ms of one CPU core in passes of
# 128, 31 ms in passes of 256, and 27 ms in one.
CHUNK = 256


class LanguageModel(Protocol):
    """What generation needs of a model. If it has `kv_cache(batch_size, capacity)`, then it also has `decode`, and its `logits`
    takes kv_cache and last, like those of the Transformer."""

    config: Any
    device: torch.device
    store: Any

    def logits(self, tokens: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Request:
    """What a sequence asks for, besides its prompt."""

    sampling: Sampling
    sample: int  # its index: draws are a function of (sampling.seed, sample, position)
    max_tokens: int
    stop: Collection[int]  # ids that end the sequence
    vocab_size: int  # only ids below it are drawn


class Decoder(Protocol):
    """Runs the sequences of an engine, each in its slot, and draws their tokens. A round of the engine is any number of starts,
    at most one per slot, then at most one advance of other slots."""

    capacity: int  # tokens per slot
    reuse: int  # a prefix can be reused in multiples of this many tokens; 0: not at all
    reuse_generated: bool  # whether generated tokens have the same keys and values, bit for bit, as those of a prompt
    lag: int  # how many rounds the engine may queue before it reads the oldest

    def start(self, slot: int, request: Request, ids: list[int], first: int, reused: int) -> None:
        """Begin a sequence, or begin again after its window slid, and queue the draw of its next token. ids: the whole text so
        far, for the position and the repetition penalty; copy it if you keep it. The window is ids[first:], of which the first
        `reused` tokens are in the slot: a multiple of `reuse`, or the whole window if the last start in the slot ran exactly
        these tokens (the logits after them are then known, or the last token is run again)."""

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a slot's window to another slot. If they are all that the last start in `source`
        ran, a start in `target` may reuse the whole."""

    def advance(self, slots: list[int]) -> None:
        """Queue one more token for each of these slots: run the one last drawn there, collected or not, and draw the next."""

    def collect(self) -> list[tuple[int, int]]:
        """(slot, token) of the oldest start or advance in the queue, in its order; waits for it. Logits that are not finite are
        a NonFiniteError, which names a parameter if one is the cause."""


class _Sequence(NamedTuple):
    request: Request
    text: list[int]  # grows as tokens are drawn
    first: int  # where the window starts


class HostDecoder:
    """Runs the model's own methods, and samples on the CPU. Without a kv_cache the window is run again for every token."""

    lag, reuse_generated = 0, False  # a prompt and a generated token go through different kernels

    def __init__(self, model: LanguageModel, slots: int, capacity: int):
        self.capacity = capacity
        self._model: Any = model
        make_cache = getattr(model, "kv_cache", None)
        self._kv_cache: Any = make_cache(slots, capacity) if make_cache else None
        self._rows = [self._kv_cache.row(slot) for slot in range(slots)] if self._kv_cache else []
        self.reuse = CHUNK if self._kv_cache and self._kv_cache.has_prefixes else 0
        self._sequences: dict[int, _Sequence] = {}
        self._first_logits: dict[int, np.ndarray] = {}  # slot -> (V,) after the last start
        self._ready: deque[list[tuple[int, int]]] = deque()

    def start(self, slot: int, request: Request, ids: list[int], first: int, reused: int) -> None:
        self._sequences[slot] = _Sequence(request, ids.copy(), first)
        if reused < len(ids) - first:
            self._first_logits[slot] = self._window(slot, ids[first:], reused)
        self._ready.append([(slot, self._draw(slot, self._first_logits[slot]))])

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self._kv_cache.copy_prefix(source, target, length)
        self._first_logits[target] = self._first_logits[source]

    def advance(self, slots: list[int]) -> None:
        sequences = [self._sequences[slot] for slot in slots]
        if self._kv_cache is None:
            rows = [self._window(slot, s.text[s.first :], 0) for slot, s in zip(slots, sequences, strict=True)]
        else:
            tokens, positions = [s.text[-1] for s in sequences], [len(s.text) - 1 - s.first for s in sequences]
            inputs = torch.tensor([tokens, slots, positions], device=self._model.device)  # (3, R) int64
            # One by one: for many elements torch wakes its other threads, which takes longer than to convert them.
            rows = [_array(row) for row in self._model.decode(*inputs, self._kv_cache, check=False).cpu()]
        self._ready.append([(slot, self._draw(slot, logits)) for slot, logits in zip(slots, rows, strict=True)])

    def collect(self) -> list[tuple[int, int]]:
        return self._ready.popleft()

    def _window(self, slot: int, ids: list[int], reused: int) -> np.ndarray:  # (V,): logits after it
        tokens = torch.tensor([ids], device=self._model.device)  # (1, T) int64
        if self._kv_cache is None:
            return _array(self._model.logits(tokens)[0, -1])
        self._rows[slot].length = reused
        for chunk in tokens[:, reused:].split(CHUNK, 1):
            logits = self._model.logits(chunk, kv_cache=self._rows[slot], last=True)
        return _array(logits[0, -1])

    def _draw(self, slot: int, logits: np.ndarray) -> int:  # (V,)
        request, text, _ = self._sequences[slot]
        try:
            token = sample(logits[: request.vocab_size], text, request.sampling, position=len(text), index=request.sample)
        except NonFiniteError:
            self._model.store.raise_if_non_finite()
            raise
        text.append(token)
        return token


def make_decoder(model: LanguageModel, slots: int, capacity: int) -> Decoder:
    if getattr(model, "draws_on_device", False):
        from tapeless.generate.device_decoder import DeviceDecoder

        return DeviceDecoder(model, slots, capacity)
    return HostDecoder(model, slots, capacity)


def _array(logits: Tensor) -> np.ndarray:  # (..., V) each
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.cpu().numpy()
