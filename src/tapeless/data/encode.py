"""Tokenizing many texts, in order, on all cores: worker processes run this file and communicate through pipes.

    request   u64 texts, u64 size, the bytes of each text as u64, the texts in UTF-8
    reply     u8 failed, u64 size, as u32 the counts and then the ids of all texts; or the error message
Each worker answers one request at a time, and at most two per worker are in flight, so memory does not grow with the text. The
result does not depend on which worker had which text. Byte and character tokenizers are faster than a pipe, and a short text is
done before a process has started: those are tokenized in this process. A worker ends when its pipe is closed.
Tested by: tests/data/test_encode.py."""

import contextlib
import itertools
import os
import queue
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO

import numpy as np

from tapeless.data.chunks import Chunk
from tapeless.data.tokenizer import Tokenizer, load_tokenizer, utf8
from tapeless.errors import DataError, TapelessError

BATCH = 1 << 18  # characters in a request, unless one chunk alone has more
WORTHWHILE = 1 << 22  # characters from which on worker processes are used
REQUEST, REPLY = struct.Struct("<QQ"), struct.Struct("<BQ")

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
        yield from _by_processes(saved, batches, processes)
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


def _by_processes(saved: Path, batches: Iterator[Batch], count: int) -> Iterator[Encoded]:
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()

    def ask(batch: Batch) -> list[np.ndarray]:
        worker = idle.get()
        try:
            return worker.ask([chunk.text for chunk in batch])
        finally:
            idle.put(worker)

    with contextlib.ExitStack() as stack:
        for _ in range(count):
            idle.put(stack.enter_context(contextlib.closing(Worker(saved))))
        threads = ThreadPoolExecutor(count)
        stack.callback(threads.shutdown, cancel_futures=True)  # before the workers are closed
        waiting: deque[tuple[Batch, Future[list[np.ndarray]]]] = deque()
        for batch in itertools.chain(batches, [None] * 2 * count):  # the last ones drain the queue
            if batch is not None:
                waiting.append((batch, threads.submit(ask, batch)))
            if waiting and (batch is None or len(waiting) >= 2 * count):
                done, future = waiting.popleft()
                yield done, future.result()


class Worker:
    """The parent's side of one worker process."""

    def __init__(self, saved: Path):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TOKENIZERS_PARALLELISM": "false"}
        command, pipe = [sys.executable, "-m", "tapeless.data.encode", str(saved)], subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout

    def ask(self, texts: list[str]) -> list[np.ndarray]:  # (n,) int64 each
        try:
            self._requests.write(packed(texts))
            self._requests.flush()
        except BrokenPipeError:
            raise self._ended() from None
        header = self._replies.read(REPLY.size)
        if len(header) < REPLY.size:
            raise self._ended()
        failed, size = REPLY.unpack(header)
        reply = self._replies.read(size)
        if failed:
            raise DataError(reply.decode())
        counts, ids = np.split(np.frombuffer(reply, "<u4").astype(np.int64), [len(texts)])
        return np.split(ids, np.cumsum(counts)[:-1])

    def _ended(self) -> TapelessError:
        return TapelessError(f"a tokenizing process ended unexpectedly with status {self._process.wait()}; try --processes 1")

    def close(self) -> None:
        self._replies.close()
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self._process.wait()


def packed(texts: list[str]) -> bytes:
    """A request."""
    parts = [utf8(text) for text in texts]
    lengths = np.array([len(part) for part in parts], "<u8").tobytes()
    return b"".join([REQUEST.pack(len(parts), sum(map(len, parts))), lengths, *parts])


def serve(tokenizer: Tokenizer, requests: IO[bytes], replies: IO[bytes]) -> None:
    """The worker's side: answer until there are no more requests."""
    while header := requests.read(REQUEST.size):
        count, size = REQUEST.unpack(header)
        ends = np.cumsum(np.frombuffer(requests.read(8 * count), "<u8").astype(np.int64)).tolist()
        data = requests.read(size)
        try:
            ids = tokenizer.encode_all([data[a:b].decode() for a, b in zip([0, *ends], ends, strict=False)])
            counts = np.array([len(x) for x in ids])
            failed, reply = 0, np.concatenate([counts, *ids]).astype("<u4").tobytes()
        except DataError as error:
            failed, reply = 1, str(error).encode()
        replies.write(REPLY.pack(failed, len(reply)) + reply)
        replies.flush()


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; closing the pipe ends this process
    try:
        serve(load_tokenizer(Path(sys.argv[1])), sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:
        os._exit(1)


if __name__ == "__main__":
    _main()
