"""Passes forward and backward that are the same but for their tokens: recorded the second time, repeated from the third on.

What a pass calls depends on the shape of its batch, the number of its targets and whether gradients are fresh, on no value. So
the calls of one are those of the next, on the same buffers, with other tokens in them (kernels/cpu/recording.py). A small model
on a CPU spends a third of its step on what this leaves out; on a GPU a graph does the same for the whole step (training/graph.py).
Tested by: tests/model/test_repeat.py."""

import logging
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.ops.op import OpSet

log = logging.getLogger("tapeless")
MOST = 4  # recordings of one model, since each has buffers of its own: two shapes, fresh and not
LATELY = 16  # passes that are remembered to have been; where the number of targets changes, no two may be the same
Pass = Callable[[Tensor, Tensor], tuple[Tensor, ...]]  # tokens, targets (B, T) -> tensors of one number


class Recorded(NamedTuple):
    ops: OpSet  # whose calls they are: as long as it is here, no other set has its id
    calls: list[Callable[[], Any]]
    tokens: Tensor  # (B, T) int64, read by the calls
    targets: Tensor  # (B, T) int64, likewise
    results: tuple[Tensor, ...]  # written by the calls


class Repeats:
    """The recordings of one model."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._recorded: dict[Hashable, Recorded | None] = {}  # None: it could not be

    @property
    def count(self) -> int:
        return sum(known is not None for known in self._recorded.values())

    def run(
        self,
        ops: OpSet,
        prepare: Callable[[], None],
        run: Pass,
        tokens: Tensor,  # (B, T) int64
        targets: Tensor,  # (B, T) int64
        *same: Hashable,
    ) -> tuple[Tensor, ...]:
        """run(tokens, targets), or what it would do. prepare: called before calls are repeated. same: all that its calls depend
        on, beside the shape of the batch, the ops and the number of threads."""
        key = (tokens.shape, id(ops), torch.get_num_threads(), *same)
        if key not in self._recorded and key in self._seen and self.count < MOST:
            self._recorded[key], results = recorded(ops, run, tokens, targets)
            return results
        known = self._recorded.get(key)
        if known is None:
            self._seen = {key, *(self._seen if len(self._seen) < LATELY else ())}
            return run(tokens, targets)
        prepare()
        known.tokens.copy_(tokens)
        known.targets.copy_(targets)
        for call in known.calls:
            call()
        return copies(known.results)


def recorded(ops: OpSet, run: Pass, *batch: Tensor) -> tuple[Recorded | None, tuple[Tensor, ...]]:
    """The recording of a pass, and what the pass returns."""
    assert ops.record is not None
    tokens, targets = (x.clone(memory_format=torch.contiguous_format) for x in batch)
    results, recording = ops.record(lambda: run(tokens, targets))
    if isinstance(recording, str):
        log.debug("passes of %d x %d tokens are not recorded: %s", *tokens.shape, recording)
        return None, results
    return Recorded(ops, recording.calls, tokens, targets, results), copies(results)


def copies(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """For the caller, since the next pass writes the same places."""
    return tuple(result.clone() for result in results)
