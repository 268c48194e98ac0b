"""Contenders that live at the same time. Those of a large model do not all fit into memory: then they run in groups, ours in
every group, and are compared within a group.

Judged by: tests/bench/test_groups.py."""

from collections.abc import Callable, Sequence

from tapeless.bench.task import OURS, Task, num_params
from tapeless.config import ModelConfig
from tapeless.model.memory import saved_bytes

PROCESS = 600 * 2**20  # a process with its libraries, a compiler's among them
SHARE = 0.85  # of what is available, since the rest is an estimate


def estimated_bytes(task: Task) -> int:
    """Of a contender's whole process, generously: 16 bytes a parameter, 4 for a copy in bfloat16 or what a generation has
    besides; of a peer's step also twice what ours keeps, and the logits with their gradients."""
    weights = 20 * num_params(task.model)
    if task.new_tokens or not isinstance(task.model, ModelConfig):
        return PROCESS + weights
    kept = sum(saved_bytes(task.model, task.train.batch_size, task.seq_len, "none", "float32").values())
    if task.contender == OURS:
        return PROCESS + weights + kept
    return PROCESS + weights + 2 * kept + 4 * 4 * task.tokens * task.model.vocab_size


def groups(tasks: Sequence[Task], room: int, size: Callable[[Task], int] = estimated_bytes) -> list[list[Task]]:
    """All tasks in as few groups as fit into `room` bytes, in order, ours in each; one contender beside ours at the least."""
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
