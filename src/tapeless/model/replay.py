"""Capture and replay of work that differs only in its batch: captured the second time, replayed from the third on.

Which calls a pass through a model makes depends on the shape of its batch, the number of its targets and whether gradients are
accumulated, not on values. The captured calls therefore run again on the same buffers with another batch in them: a list of
calls on a CPU (kernels/cpu/capture.py), a CUDA graph on a GPU (kernels/triton/graph.py). Used for a pass, for an evaluation and
for a whole training step (training/captured_step.py).
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
Pass = Callable[..., tuple[Tensor, ...]]  # tokens, targets and perhaps documents (B, T) -> small tensors


class CapturedPass(NamedTuple):
    ops: OpSet  # whose calls they are; holding it keeps its id unique
    calls: list[Callable[[], Any]]
    batch: tuple[Tensor, ...]  # (B, T) int64 each, read by the calls
    results: tuple[Tensor, ...]  # written by the calls


class CapturedPasses:
    def __init__(self, most: int = MAX_CAPTURED) -> None:
        """most: how many are captured; others run."""
        self.most = most
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
        batch: tuple[Tensor, ...],  # (B, T) int64 each
        *key: Hashable,
    ) -> tuple[Tensor, ...]:
        """run(*batch), or its replay. prepare: called before a replay. key: everything its calls depend on, besides the shape
        of the batch, the ops and the number of threads."""
        if ops.capture is None or torch.is_inference_mode_enabled():  # in which torch's dispatcher shows fewer calls
            return run(*batch)
        key = (len(batch), batch[0].shape, id(ops), torch.get_num_threads(), *key)
        known = self._captured.get(key)
        if known is None:
            if key in self._seen and key not in self._captured and self.count < self.most:
                self._captured[key], results = capture_pass(ops, run, batch)
                return results
            self._seen = {key, *(self._seen if len(self._seen) < REMEMBERED else ())}
            return run(*batch)
        prepare()
        for own, x in zip(known.batch, batch, strict=True):
            own.copy_(x)
        for call in known.calls:
            call()
        return copies(known.results)


def capture_pass(ops: OpSet, run: Pass, batch: tuple[Tensor, ...]) -> tuple[CapturedPass | None, tuple[Tensor, ...]]:
    """The captured pass, and what the pass returns."""
    assert ops.capture is not None
    own = tuple(x.clone(memory_format=torch.contiguous_format) for x in batch)
    results, captured = ops.capture(lambda: run(*own))
    if isinstance(captured, str):
        log.debug("passes of %d x %d tokens are not captured: %s", *own[0].shape, captured)
        return None, results
    return CapturedPass(ops, captured.calls, own, results), copies(results)


def copies(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """For the caller, since the next replay overwrites the results."""
    return tuple(result.clone() for result in results)
