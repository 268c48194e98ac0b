"""The parent's end of a worker: starts it, asks, and waits for its end. Tested by: tests/bench/test_process.py."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from tapeless.bench.task import OUR_OWN, Task
from tapeless.data.worker import PYTHON
from tapeless.errors import WorkerError
from tapeless.progress import busy

COMMAND = (*PYTHON, "tapeless.bench")
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # how threads wait, which `tapeless` sets for itself
CACHES = ("NUMBA_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def environment(task: Task, threads: int | None, caches: str | None = None) -> dict[str, str]:
    """Ours runs in the environment of the `tapeless` command, the others with torch's defaults: a peer can be twice as slow
    if its threads wait in another way. caches: a folder for whatever is compiled, instead of the usual ones."""
    result = dict(os.environ)
    if task.contender not in OUR_OWN:
        for name in WAITING:
            result.pop(name, None)
    if threads:
        result |= {"OMP_NUM_THREADS": str(threads), "NUMBA_NUM_THREADS": str(threads)}
    if caches:
        result |= {name: os.path.join(caches, name) for name in CACHES}
    return result


class Process:
    """A started worker. Closing it waits for its end, so that its memory is free again."""

    def __init__(self, task: Task, environment: Mapping[str, str], command: Sequence[str] = COMMAND):
        self.task, self.started = task, time.monotonic()
        self._noise = tempfile.TemporaryFile("w+")  # noqa: SIM115  open for the life of the worker
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._noise, text=True, env=dict(environment)
        )

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            with busy(f"{self.task.label}: {do}"):
                line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerError(f"{self.task.label} ended without an answer, status {self._process.wait()}{self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.task.label}: {answer['error']}")
        return answer

    def since_start(self) -> float:
        return time.monotonic() - self.started

    def _last_words(self) -> str:
        self._noise.seek(0)
        lines = self._noise.read().strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._process.kill()  # it may be in the middle of a long answer
        with busy(f"{self.task.label}: ending"):
            self._process.communicate()  # closes its stdin, which ends it
        self._noise.close()
