"""Another process, which answers requests through pipes: to use more cores, or to run a package on files of unknown origin.

A tokenizer.json, a chat template and a table are read by packages that such a file can make crash, run for hours or allocate
all memory. Each runs in a process with `Limits`, and whatever ends that process is one line of error here.

    message   u64 number of parts, the length of each as u64, the parts
    request   seconds, as text (empty: any number); arguments      reply   code of an error, or nothing; results, or its text
The first request is answered by the function that `make` names ("module:function"): it returns the function for the rest. An
alarm of the operating system ends a process that takes too long, even inside of a package; a process ends with its pipe.
Tested by: tests/data/test_limited_worker.py."""

import contextlib
import os
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import IO, NamedTuple

from tapeless.errors import DataError, TapelessError

# The current folder may be one that somebody else filled: without -P a module of it would be imported, and run.
PYTHON = (sys.executable, "-P", "-m")
NUMBER = struct.Struct("<Q")
STATM = "/proc/self/statm"
MAX_REPLY = 1 << 28  # bytes
OTHER = "OTHER"  # an error that is not one of tapeless
START = 60.0  # seconds for imports, on a busy machine
BYTES_PER_SECOND = 50_000  # of text, that a tokenizer must at least encode
Answer = Callable[..., Iterable[bytes]]


class Limits(NamedTuple):
    seconds: float = 10.0  # of a request
    memory: int = 2 << 30  # bytes beyond those of the imported packages


class Worker:
    """The parent's side; usable from several threads."""

    def __init__(self, make: str, *arguments: bytes, what: str, limits: Limits | None = None):
        """arguments: of the first request. what: the subject of error messages."""
        self.make, self.arguments, self.what, self.limits = make, arguments, what, limits
        self._lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TOKENIZERS_PARALLELISM": "false"}
        # Address space is what can be limited: no reserves of it for threads that do not come.
        environment |= {"MALLOC_ARENA_MAX": "2", "ARROW_DEFAULT_MEMORY_POOL": "system"} if self.limits else {}
        command = [*PYTHON, "tapeless.data.worker", self.make, str(self.limits.memory if self.limits else 0)]
        pipe, noise = subprocess.PIPE, subprocess.DEVNULL if self.limits else None
        # A session of its own: Ctrl-C and a closing terminal are for the parent.
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=noise, env=environment, start_new_session=True)
        self._process: subprocess.Popen[bytes] | None = process
        self.close = weakref.finalize(self, _end, process)
        self._exchange(START if self.limits else None, self.arguments)

    def ask(self, *arguments: bytes, seconds: float = 0.0) -> list[bytes]:
        """seconds: more than the limit, for a large request."""
        with self._lock:
            if self._process is None:
                self._start()
            return self._exchange(self.limits.seconds + seconds if self.limits else None, arguments)

    def _exchange(self, seconds: float | None, arguments: Iterable[bytes]) -> list[bytes]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_message(process.stdin, [b"" if seconds is None else str(seconds).encode(), *arguments])
            reply = read_message(process.stdout)
        except BrokenPipeError:
            reply = []
        except BaseException:  # Ctrl-C: its answer would be taken for that of the next request
            self._stop()
            raise
        if not reply:
            raise self._ended(self._stop(), seconds)
        if code := reply[0].decode():
            error = DataError(f"{self.what}: {reply[1].decode()}" if code == OTHER else reply[1].decode())
            error.code = DataError.code if code == OTHER else code
            raise error
        return reply[1:]

    def _stop(self) -> int:
        process, self._process = self._process, None
        assert process is not None
        if process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)  # it may be ending by itself, for a reason that is to be told
        process.kill()
        self.close()
        return process.wait()

    def _ended(self, status: int, seconds: float | None) -> TapelessError:
        if self.limits is None or status == -signal.SIGKILL:
            return TapelessError(f"{self.what} ended unexpectedly with status {status}")
        if status == -getattr(signal, "SIGALRM", 0):
            return DataError(f"{self.what} took more than {seconds:g} s")
        return DataError(f"{self.what} made its process end with status {status}: a crash, or {_too_much(self.limits.memory)}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()  # type: ignore[union-attr]
    process.wait()


def _too_much(memory: int) -> str:
    return f"more than {memory >> 30} GiB of memory"


def write_message(file: IO[bytes], parts: Iterable[bytes]) -> None:
    parts = list(parts)
    file.write(b"".join([NUMBER.pack(len(parts)), *(NUMBER.pack(len(part)) for part in parts), *parts]))
    file.flush()


def read_message(file: IO[bytes]) -> list[bytes]:
    """Nothing at the end of the pipe."""
    header = file.read(NUMBER.size)
    if len(header) < NUMBER.size:
        return []
    lengths = file.read(NUMBER.size * NUMBER.unpack(header)[0])
    return [file.read(length) for (length,) in NUMBER.iter_unpack(lengths)]


def serve(make: Callable[..., Answer], requests: IO[bytes], replies: IO[bytes], memory: int = 0) -> None:
    """The process's side, until there are no more requests."""
    answer: Answer | None = None
    while request := read_message(requests):
        _alarm(float(request[0] or 0))
        try:
            if answer is None:
                answer, reply = make(*request[1:]), [b""]
            else:
                reply = [b"", *answer(*request[1:])]
            if memory and sum(map(len, reply)) > MAX_REPLY:
                raise MemoryError
        except BaseException as error:  # a panic of Rust is not an Exception
            reply = _error_reply(error, memory)
        _alarm(0)
        write_message(replies, reply)


def _error_reply(error: BaseException, memory: int) -> list[bytes]:
    if isinstance(error, TapelessError):
        code, text = error.code, str(error)
    elif isinstance(error, MemoryError):
        code, text = OTHER, f"it needs {_too_much(memory)}"
    else:
        code, text = OTHER, f"{type(error).__name__}: {str(error)[:200]}"
    return [code.encode(), text.encode(errors="replace")]


def _alarm(seconds: float) -> None:
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _limit_memory(memory: int) -> None:
    if memory and os.path.exists(STATM):
        import resource

        with open(STATM) as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + memory, now + memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _main() -> None:
    module, _, name = sys.argv[1].partition(":")
    memory = int(sys.argv[2])
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a package prints is no reply
    _alarm(START if memory else 0)
    make = getattr(import_module(module), name)
    _limit_memory(memory)
    try:
        serve(make, sys.stdin.buffer, replies, memory)
    except BrokenPipeError:
        os._exit(1)


if __name__ == "__main__":
    _main()
