"""Capture and replay of forward and backward passes that differ only in their tokens: captured the second time, replayed from
the third on.

Which calls a pass makes depends on the shape of its batch, the number of its targets and whether gradients are accumulated, not
on values. The captured calls therefore run again on the same buffers with other tokens in them (kernels/cpu/capture.py). A
small model on a CPU spends a third of its step on the Python that this removes; on a GPU a CUDA graph does it for the whole
step (training/graph.py).
Tested by: tests/model/test_replay.py."""

import logging
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.ops.op import OpSet

log = logging.getLogger("tapeless")
MAX_CAPTURED = 4  # passes per model, since each has its own buffers: two shapes, accumulating and not
REMEMBERED = 16  # keys of recent passes; if the number of targets varies, no two may be equal
Pass = Callable[[Tensor, Tensor], tuple[Tensor, ...]]  # tokens, targets (B, T) -> tensors of one number


class CapturedPass(NamedTuple):
    ops: OpSet  # whose calls they are; holding it keeps its id unique
    calls: list[Callable[[], Any]]
    tokens: Tensor  # (B, T) int64, read by the calls
    targets: Tensor  # (B, T) int64, likewise
    results: tuple[Tensor, ...]  # written by the calls


class CapturedPasses:
    """The captured passes of one model."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._captured: dict[Hashable, CapturedPass | None] = {}  # None: capture failed

    @property
    def count(self) -> int:
        return sum(known is not None for known in self._captured.values())

    def run(
        self,
        ops: OpSet,
        prepare: Callable[[], None],
        run: Pass,
        tokens: Tensor,  # (B, T) int64
        targets: Tensor,  # (B, T) int64
        *key: Hashable,
    ) -> tuple[Tensor, ...]:
        """run(tokens, targets), or its replay. prepare: called before a replay. key: everything its calls depend on, besides
        the shape of the batch, the ops and the number of threads."""
        key = (tokens.shape, id(ops), torch.get_num_threads(), *key)
        if key not in self._captured and key in self._seen and self.count < MAX_CAPTURED:
            self._captured[key], results = capture_pass(ops, run, tokens, targets)
            return results
        known = self._captured.get(key)
        if known is None:
            self._seen = {key, *(self._seen if len(self._seen) < REMEMBERED else ())}
            return run(tokens, targets)
        prepare()
        known.tokens.copy_(tokens)
        known.targets.copy_(targets)
        for call in known.calls:
            call()
        return copies(known.results)


def capture_pass(ops: OpSet, run: Pass, *batch: Tensor) -> tuple[CapturedPass | None, tuple[Tensor, ...]]:
    """The captured pass, and what the pass returns."""
    assert ops.capture is not None
    tokens, targets = (x.clone(memory_format=torch.contiguous_format) for x in batch)
    results, captured = ops.capture(lambda: run(tokens, targets))
    if isinstance(captured, str):
        log.debug("passes of %d x %d tokens are not captured: %s", *tokens.shape, captured)
        return None, results
    return CapturedPass(ops, captured.calls, tokens, targets, results), copies(results)


def copies(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """For the caller, since the next replay overwrites the results."""
    return tuple(result.clone() for result in results)
