"""Tokenizing many texts, in order, on all cores, by worker processes.

Each worker answers one request at a time, and at most two per worker are in flight, so memory does not grow with the text. The
result does not depend on which worker had which text. Byte and character tokenizers are faster than a pipe, and a short text is
done before a process has started: those are tokenized in this process. A worker ends when its pipe is closed.
Tested by: tests/data/test_encode.py."""

import contextlib
import itertools
import os
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tapeless.data.chunks import Chunk
from tapeless.data.tokenizer import Tokenizer, load_tokenizer, utf8
from tapeless.data.worker import BYTES_PER_SECOND, Limits, Worker

BATCH = 1 << 18  # characters in a request, unless one chunk alone has more
WORTHWHILE = 1 << 22  # characters from which on worker processes are used

Batch = list[Chunk]
Encoded = tuple[Batch, list[np.ndarray]]  # the ids of each chunk (n,)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_chunks(
    tokenizer: Tokenizer,
    saved: Path,  # its tokenizer.json, for the workers
    chunks: Iterable[Chunk],
    *,
    num_characters: int,
    processes: int,
) -> Iterator[Encoded]:
    batches = batched(chunks)
    if processes > 1 and tokenizer.kind == "bpe" and num_characters >= WORTHWHILE:
        yield from _by_processes(saved, tokenizer.guarded, batches, processes)
    else:
        for batch in batches:
            yield batch, tokenizer.encode_all([chunk.text for chunk in batch])


def batched(chunks: Iterable[Chunk]) -> Iterator[Batch]:
    batch, size = Batch(), 0
    for chunk in chunks:
        if batch and size + len(chunk.text) > BATCH:
            yield batch
            batch, size = [], 0
        batch.append(chunk)
        size += len(chunk.text)
    if batch:
        yield batch


def _by_processes(saved: Path, guarded: bool, batches: Iterator[Batch], count: int) -> Iterator[Encoded]:
    arguments = os.fsencode(saved), b"1" if guarded else b""
    options: dict[str, Any] = {"what": "a tokenizing process", "limits": Limits() if guarded else None}
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()

    def ask_one(batch: Batch) -> list[np.ndarray]:
        worker = idle.get()
        try:
            return ask(worker, [chunk.text for chunk in batch])
        finally:
            idle.put(worker)

    with contextlib.ExitStack() as stack:
        for _ in range(count):
            idle.put(stack.enter_context(contextlib.closing(Worker("tapeless.data.encode:answers", *arguments, **options))))
        threads = ThreadPoolExecutor(count)
        stack.callback(threads.shutdown, cancel_futures=True)  # before the workers are closed
        waiting: deque[tuple[Batch, Future[list[np.ndarray]]]] = deque()
        for batch in itertools.chain(batches, [None] * 2 * count):  # the last ones drain the queue
            if batch is not None:
                waiting.append((batch, threads.submit(ask_one, batch)))
            if waiting and (batch is None or len(waiting) >= 2 * count):
                done, future = waiting.popleft()
                yield done, future.result()


def answers(saved: bytes, guard: bytes) -> Callable[..., list[bytes]]:
    """The worker's side (worker.py): as u32 the counts and then the ids of all texts."""
    tokenizer = load_tokenizer(Path(os.fsdecode(saved)), guarded=bool(guard))

    def answer(*texts: bytes) -> list[bytes]:
        ids = tokenizer.encode_all([text.decode() for text in texts])
        return [np.concatenate([[len(x) for x in ids], *ids]).astype("<u4").tobytes()]

    return answer


def ask(worker: Worker, texts: list[str]) -> list[np.ndarray]:  # (n,) int64 each
    parts = [utf8(text) for text in texts]
    (reply,) = worker.ask(*parts, seconds=sum(map(len, parts)) / BYTES_PER_SECOND)
    counts, ids = np.split(np.frombuffer(reply, "<u4").astype(np.int64), [len(texts)])
    return np.split(ids, np.cumsum(counts)[:-1])
