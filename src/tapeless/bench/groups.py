"""Contenders that live at the same time. Those of a large model do not all fit into memory: then they run in groups, ours in
every group, and are compared within a group.

Tested by: tests/bench/test_groups.py."""

from collections.abc import Callable, Sequence

from tapeless.bench.task import FLOOR, OUR_OWN, OURS, Task
from tapeless.config import ModelConfig
from tapeless.model.build import num_params
from tapeless.model.memory import saved_bytes

PROCESS = 500 * 2**20  # a process with its libraries, a compiler's among them
SHARE = 0.9  # of what is available, since the rest is an estimate


def estimated_bytes(task: Task) -> int:
    """Of a contender's whole process. Weights, gradients and two moments take 16 bytes a parameter, a copy in bfloat16 two
    more; a peer saves half as much again as ours for its backward, and the logits thrice."""
    n, c, itemsize = num_params(task.model), task.model, task.compute.itemsize
    logits = task.tokens * c.vocab_size
    if task.contender == FLOOR:
        return PROCESS + 2 * itemsize * (n + logits)
    weights = n * (16 if itemsize == 4 else 18)
    if task.new_tokens or not isinstance(c, ModelConfig):
        return PROCESS + weights
    saved = sum(saved_bytes(c, task.train.batch_size, task.seq_len, "none", "float32").values())
    return PROCESS + weights + (saved if task.contender in OUR_OWN else saved * 3 // 2 + 3 * 4 * logits)


def groups(tasks: Sequence[Task], room: int, size: Callable[[Task], int] = estimated_bytes) -> list[list[Task]]:
    """All tasks in as few groups as fit into `room` bytes, in order, ours in each; at least one contender with ours."""
    always = [task for task in tasks if task.contender == OURS]
    others = [task for task in tasks if task.contender != OURS]
    base = sum(map(size, always))
    result: list[list[Task]] = []
    free = 0
    for task in others:
        if not result or size(task) > free:
            result.append([*always])
            free = int(room * SHARE) - base
        result[-1].append(task)
        free -= size(task)
    return result or [always]
