"""The next batch: on a GPU read while the current step computes, on a CPU several at a time.

For a GPU a thread reads the batch into pinned memory and copies it to the device on a stream of its own, so that a step finds
it there. On a CPU a thread would take a core from the step. Reading takes a dozen calls, 35 us between two steps, however small
the batch: those of the next steps are read together.
Tested by: tests/train/test_prefetch.py."""

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from tapeless.data.loader import ExampleLoader, Loader
from tapeless.ops.numerics import copy_stream

Batch = tuple[Tensor, ...]  # tokens, targets (B, T) int64, and document_ids if masked
TOGETHER = 2**15  # tokens that are read at a time on a CPU: half a megabyte


class Prefetch:
    def __init__(self, loader: Loader | ExampleLoader, device: torch.device):
        self.loader, self.device = loader, device
        self._thread: ThreadPoolExecutor | None = None
        self._next: tuple[int, Future[Batch]] | None = None  # its first sample
        self._read_ahead: dict[int, Batch] = {}  # on a CPU, by first sample

    def at(self, first_sample: int) -> Batch:
        """The batch that begins with this sample, on the device; on a GPU, starts to read the one after it."""
        if self.device.type == "cpu":
            return self._of_several(first_sample)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        batch = self._next[1].result() if self._next and self._next[0] == first_sample else self._read(first_sample)
        following = first_sample + self.loader.batch_size
        self._next = following, self._thread.submit(self._read, following)
        return batch

    def _of_several(self, first_sample: int) -> Batch:
        if first_sample not in self._read_ahead:
            size = self.loader.batch_size
            count = max(1, TOGETHER // (size * self.loader.seq_len))
            parts = [part.split(size) for part in self.loader.rows(first_sample, count * size)]
            self._read_ahead = {first_sample + i * size: batch for i, batch in enumerate(zip(*parts, strict=True))}
        return self._read_ahead[first_sample]

    def _read(self, first_sample: int) -> Batch:
        batch = self.loader.batch(first_sample)
        if self.device.type != "cuda":
            return tuple(part.to(self.device) for part in batch)
        stream = copy_stream(self.device)
        with torch.cuda.stream(stream):
            moved = tuple(part.pin_memory().to(self.device, non_blocking=True) for part in batch)
        stream.synchronize()
        for part in moved:  # its memory is not reused before the step that reads it is done
            part.record_stream(torch.cuda.default_stream(self.device))
        return moved

    def close(self) -> None:
        """Wait for the thread; a later call of at() starts another."""
        if self._thread is not None:
            self._thread.shutdown()
        self._thread = self._next = None
        self._read_ahead = {}
