"""Checkpoints written in the background: training pauses for a snapshot, and a thread hashes and writes it.

    training thread   wait for the checkpoint before this one -> snapshot -> train on
    writer thread     sync metrics.jsonl -> write, hash, sync, rename, `latest` (checkpoint.py) -> rotation (rotation.py)
At most one checkpoint is being written. A save that is due while the one before is still being written waits for it: every
checkpoint that is due is written, however slow the disk, and memory is needed for one snapshot only.
The snapshot is a copy on the device of the tensors, or of a GPU's in host memory. Where neither has twice the room, training
waits until the checkpoint is written.
The bytes are those of a checkpoint that is written in the foreground. The training thread collects the outcomes between steps,
and emits events and warnings; whatever is raised in the writer thread is part of an outcome.
Tested by: tests/train/test_checkpoint_writer.py, tests/faults/test_checkpoint_kill.py."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.errors import WriteError
from tapeless.training.checkpoint import point_to, save_checkpoint
from tapeless.training.resources import available_bytes, format_bytes
from tapeless.training.rotation import rotate

log = logging.getLogger("tapeless")
ROOM = 2  # times the size of a snapshot must be free: the next steps may need memory too
Tensors = Mapping[str, Mapping[str, Tensor]]  # kind ("params", "exp_avg", …) -> parameter name -> tensor


class Outcome(NamedTuple):
    """Of one checkpoint, or of marking one as the best."""

    step: int
    path: Path | None  # None: no checkpoint was written
    error: Exception | None  # a WriteError, or a bug in what the thread runs
    warnings: list[str]


class CheckpointWriter:
    def __init__(self, folder: Path, *, keep_last: int, keep_every: int, before_write: Callable[[], None]):
        """before_write: called in the writer thread before each checkpoint."""
        self.folder, self.keep_last, self.keep_every, self.before_write = folder, keep_last, keep_every, before_write
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
        self._jobs: list[Future[Outcome]] = []  # whose outcomes have not been collected
        self._warned = False
        self._failed: int | None = None  # the step of the last checkpoint, if it could not be written

    def save(
        self,
        params: Mapping[str, Tensor],
        optim_state: Tensors,
        state: Mapping[str, Any],
        *,
        protect: int | None,
        background: bool = True,
    ) -> None:
        """Start writing a checkpoint of state["step"]. protect: a step that rotation keeps. background: False takes no
        snapshot, for a caller who waits for the outcome."""
        self.wait()
        tensors = {"params": params, **optim_state}
        copied = snapshot(tensors) if background else None
        if background and copied is None and not self._warned:
            self._warned = True
            size = format_bytes(num_bytes(tensors))
            log.warning("no memory for a copy of the %s that a checkpoint holds: training waits while one is written", size)
        self._submit(self._write, copied or taken_now(tensors), dict(state), protect)
        if copied is None:
            self.wait()

    def wait(self) -> float:
        """Until everything is written; returns the seconds that took."""
        start = time.monotonic()
        for job in self._jobs:
            job.exception()  # waits
        return time.monotonic() - start

    def mark_best(self, step: int) -> None:
        """Point `best` to the checkpoint of a step, after it is written."""
        self._submit(self._mark_best, step)

    def _submit(self, act: Callable[..., Outcome], *args: Any) -> None:
        try:
            self._jobs.append(self._thread.submit(act, *args))
        except RuntimeError:  # no more threads (`ulimit -u`): in this one
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
            done: Future[Outcome] = Future()
            done.set_result(act(*args))
            self._jobs.append(done)

    def outcomes(self, *, wait: bool = False) -> Iterator[Outcome]:
        """Of what was finished since the last call, in order; with wait, of everything."""
        if wait:
            self.wait()
        while self._jobs and self._jobs[0].done():
            yield self._jobs.pop(0).result()

    def close(self) -> None:
        """Wait for the thread to end. The writer can still be used: a new thread is started."""
        self._thread.shutdown()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")

    def _write(self, taken: "Snapshot", state: dict[str, Any], protect: int | None) -> Outcome:
        step: int = state["step"]
        path, warnings = None, list[str]()
        self._failed = step
        try:
            self.before_write()
            if taken.ready is not None:
                taken.ready.synchronize()
            path = save_checkpoint(self.folder, taken.tensors.pop("params"), taken.tensors, state)
            self._failed = None
            keep = {"keep_last": self.keep_last, "keep_every": self.keep_every}
            rotate(self.folder, **keep, protect=protect, written=step, on_warning=warnings.append)
        except Exception as error:
            return Outcome(step, path, error, warnings)
        finally:
            taken.tensors.clear()  # the thread references its argument until after the outcome is known, and the next is copied
        return Outcome(step, path, None, warnings)

    def _mark_best(self, step: int) -> Outcome:
        try:
            if step != self._failed:
                point_to(self.folder, "best", self.folder / f"step-{step:08d}")
        except WriteError as error:
            return Outcome(step, None, None, [f"{error}; training continues"])
        except Exception as error:
            return Outcome(step, None, error, [])
        return Outcome(step, None, None, [])


class Snapshot(NamedTuple):
    tensors: dict[str, Mapping[str, Tensor]]
    ready: "torch.cuda.Event | None" = None  # on a GPU: when other streams can read them


def taken_now(tensors: dict[str, Mapping[str, Tensor]]) -> Snapshot:
    """Of tensors that nothing changes from here on."""
    device = next(tensors_of(tensors)).device
    if device.type != "cuda":
        return Snapshot(tensors)
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(device))
    return Snapshot(tensors, ready)


def snapshot(tensors: Tensors) -> Snapshot | None:
    """Copies that training does not change; None if there is no room for them."""
    size, device = num_bytes(tensors), next(tensors_of(tensors)).device
    for place in dict.fromkeys([device, torch.device("cpu")]):
        if ROOM * size > available_bytes(str(place)):
            continue
        try:
            return _copy_to(place, tensors)
        except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError for pinned and for pageable memory
            log.info("a checkpoint cannot be copied to %s: %s", place, error)
    return None


def _copy_to(place: torch.device, tensors: Tensors) -> Snapshot:
    pinned = place.type == "cpu" and next(tensors_of(tensors)).is_cuda  # several times as fast as pageable memory

    def copy(x: Tensor) -> Tensor:
        return torch.empty_like(x, device=place, pin_memory=pinned).copy_(x, non_blocking=True)

    copied: dict[str, Mapping[str, Tensor]] = {
        kind: {name: copy(x) for name, x in views.items()} for kind, views in tensors.items()
    }
    if pinned:
        torch.cuda.synchronize(next(tensors_of(tensors)).device)
    return taken_now(copied)


def tensors_of(tensors: Tensors) -> Iterator[Tensor]:
    return (x for views in tensors.values() for x in views.values())


def num_bytes(tensors: Tensors) -> int:
    return sum(x.nbytes for x in tensors_of(tensors))
