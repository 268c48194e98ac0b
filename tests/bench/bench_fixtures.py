"""A task of a small model, and a worker that answers at once."""

from typing import Any

from tapeless.bench.task import Task, measured
from tapeless.config import ModelConfig, TrainConfig
from tapeless.errors import WorkerError

SMALL = ModelConfig(vocab_size=23, hidden_dim=16, num_layers=2, num_heads=4, intermediate_dim=24, max_seq_len=8)


def task(contender: str = "ours", dtype: str = "float32", **choices: Any) -> Task:
    return Task(contender, choices.pop("model", SMALL), measured(TrainConfig(dtype=dtype, batch_size=3), 8), **choices)


class FakeWorker:
    """Steps take what `seconds` says of the task, and the order of all turns is written down."""

    log: list[tuple[str, str, int]]

    def __init__(self, task: Task, seconds: float, log: list, *, broken: bool = False):
        self.task, self.seconds, self.log, self.broken = task, seconds, log, broken

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.log.append((self.task.label, do, arguments.get("count", 0)))
        if self.broken:
            raise WorkerError(f"{self.task.label}: cannot run")
        return {
            "build": {"before": 100},
            "first": {"result": 3.0},
            "steps": {"seconds": [self.seconds] * arguments.get("count", 0), "others": 0.02},
            "reset": {},
            "finish": {"peak": 180, "reserved": None, "parts": {"parameters": 50}, "facts": {}},
        }[do]

    def since_start(self) -> float:
        return 1.5

    def __enter__(self) -> "FakeWorker":
        return self

    def __exit__(self, *error: Any) -> None:
        self.log.append((self.task.label, "close", 0))
