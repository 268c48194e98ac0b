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
        self._block: tuple[int, Batch] | None = None  # of several batches on a CPU: its first sample

    def at(self, first_sample: int) -> Batch:
        """The batch that begins with this sample, on the device; on a GPU, starts to read the one after it."""
        if self.device.type == "cpu":
            return self._of_block(first_sample)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        batch = self._next[1].result() if self._next and self._next[0] == first_sample else self._read(first_sample)
        following = first_sample + self.loader.batch_size
        self._next = following, self._thread.submit(self._read, following)
        return batch

    def _of_block(self, first_sample: int) -> Batch:
        size = self.loader.batch_size
        if self._block is None or not 0 <= first_sample - self._block[0] <= len(self._block[1][0]) - size:
            count = max(1, TOGETHER // (size * self.loader.seq_len)) * size
            self._block = first_sample, self.loader.rows(first_sample, count)
        start = first_sample - self._block[0]
        return tuple(part[start : start + size] for part in self._block[1])

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
        self._thread = self._next = self._block = None
