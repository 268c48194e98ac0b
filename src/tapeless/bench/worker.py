"""A contender in its own process, with its own memory and threads; between its turns it sleeps on the pipe.

    {"do": "build", "task": …}      -> {"before": bytes}             libraries are loaded, the model is not yet
    {"do": "first"}                 -> {"result": loss or tokens}    the first unit of work, from the initial weights
    {"do": "steps", "count": k}     -> {"seconds": […], "others": share}   of the cores, that other processes had
    {"do": "reset"}                 -> {}                            the high-water mark of memory counts from here
    {"do": "finish"}                -> {"peak": bytes, "reserved": bytes, "parts": {…}, "facts": {…}}
One line of JSON each, on stdin and stdout; a failure answers {"error": …}. The end of stdin is the end of the worker.
Tested by: tests/bench/test_worker.py."""

import json
import os
import sys
from collections.abc import Iterable
from typing import IO, Any

from torch import Tensor

from tapeless.bench.contenders import build, load_libraries
from tapeless.bench.device import peak_bytes, reserved_bytes, reset_peak, used_bytes
from tapeless.bench.machine import Others
from tapeless.bench.task import Contender, Task
from tapeless.training.fastest import clock, synchronize


class Worker:
    task: Task
    contender: Contender

    def __init__(self) -> None:
        self.steps_taken = 0

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "build":
                return self.build(Task.from_json(request["task"]))
            case "first":
                return {"result": self.first()}
            case "steps":
                others = Others()
                return {"seconds": [self.timed() for _ in range(request["count"])], "others": others.share()}
            case "reset":
                reset_peak(self.task.train.device)
                return {}
            case "finish":
                device = self.task.train.device
                memory = {"peak": peak_bytes(device), "reserved": reserved_bytes(device)}  # before facts, which may take more
                return {**memory, "parts": self.contender.parts(), "facts": self.contender.facts()}
        raise ValueError(f"no such request: {request['do']}")

    def build(self, task: Task) -> dict[str, Any]:
        self.task = task
        load_libraries(task)
        before = used_bytes(task.train.device)
        self.contender = build(task)
        return {"before": before}

    def first(self) -> Any:
        self.contender.prepare(self.steps_taken)
        result = self.contender.step()
        synchronize(self.task.train.device)
        self.steps_taken += 1
        return result.item() if isinstance(result, Tensor) else result

    def timed(self) -> float:
        self.contender.prepare(self.steps_taken)
        self.steps_taken += 1
        return clock(self.contender.step, self.task.train.device)


def serve(requests: Iterable[str], answers: IO[str]) -> None:
    worker = Worker()
    for line in requests:
        try:
            answer = worker.answer(json.loads(line))
        except Exception as error:
            words = str(error).strip().splitlines() or [""]
            answer = {"error": f"{type(error).__name__}: {words[0]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    # Whatever a library prints must not end up between the answers.
    private = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin, private)
