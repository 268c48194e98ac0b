"""The questions of `tapeless bench`: a training step and its peers, generation, the largest batch, and how ours scales.

Each answer is a record of plain data: the machine, the model, and the summary of what was measured."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tapeless.bench.first_step import first_steps
from tapeless.bench.groups import groups
from tapeless.bench.kernel_profile import kernel_profile
from tapeless.bench.largest_batch import largest_batch
from tapeless.bench.machine import conditions, machine
from tapeless.bench.process import Process, environment
from tapeless.bench.side_by_side import TURN, Progress, side_by_side
from tapeless.bench.summary import summary
from tapeless.bench.task import FLOOR, OURS, PROMPT, Task
from tapeless.config import ModelConfig
from tapeless.errors import ConfigError
from tapeless.model.build import num_params
from tapeless.training.resources import available_bytes

LENGTHS = (128, 256, 512, 1024, 2048, 4096)  # T, at the model's own width
WIDTHS = (64, 128, 256, 512, 1024)  # C, at FIXED_LENGTH
FIXED_LENGTH = 256
TOKENS = 4096  # in every step of the scaling, so that all points do as many matmuls


@dataclass(frozen=True)
class How:
    """How anything is measured, whatever it is."""

    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    rounds: int = 5
    turn: float = TURN
    threads: int | None = None
    progress: Progress = lambda text: None

    def compared(self, task: Task, contenders: Sequence[str]) -> dict[str, Any]:
        tasks = self.tasks(task, contenders)
        room = available_bytes(task.train.device)
        together = groups(tasks, room)
        if len(together) > 1:
            self.progress(f"{len(tasks)} contenders do not fit into {room / 2**30:.1f} GiB: {len(together)} groups")
        found = side_by_side(together, self.start, rounds=self.rounds, turn=self.turn, progress=self.progress)
        return summary(found)

    def tasks(self, task: Task, contenders: Sequence[str]) -> list[Task]:
        """Every contender in every dtype it has: fp8 is ours alone."""
        return [
            task.by(contender, dtype)
            for dtype in self.dtypes
            for contender in contenders
            if dtype != "fp8" or contender == OURS
        ]

    def start(self, task: Task, caches: str | None = None) -> Process:
        return Process(task, environment(task, self.threads, caches))


def described(name: str, task: Task, how: How) -> dict[str, Any]:
    return {
        "name": name,
        "model": asdict(task.model),
        "parameters": num_params(task.model),
        "batch_size": task.train.batch_size,
        "seq_len": task.seq_len,
        "tokens": task.tokens,
        "ops": task.train.ops,
        "recompute": task.train.recompute,
        "rounds": how.rounds,
        "machine": machine(),
        "conditions": conditions(task.train.device, how.threads),
    }


def training(name: str, task: Task, contenders: Sequence[str], how: How, *, cold: bool = False) -> dict[str, Any]:
    """A training step, side by side. cold: also the time to the first step of each, in processes of their own."""
    result = {"kind": "training", **described(name, task, how), **how.compared(task, contenders)}
    if cold:
        timed = [each for each in how.tasks(task, contenders) if each.contender != FLOOR]
        result["first_steps"] = first_steps(timed, how.start, how.progress)
    return result


def largest(name: str, task: Task, contenders: Sequence[str], how: How) -> dict[str, Any]:
    """The largest batch that each contender can train on the device."""
    wanted = [each for each in how.tasks(task, contenders) if each.contender != FLOOR]
    room = available_bytes(task.train.device)
    rows = {each.label: largest_batch(each, room, how.start, how.progress) for each in wanted}
    return {"kind": "largest", **described(name, task, how), "largest_batch": rows, "busy": 0.0}


def kernels(name: str, task: Task, how: How) -> dict[str, Any]:
    """Where our own step spends its time on a GPU, in each dtype."""
    if not isinstance(task.model, ModelConfig) or task.model.norm_placement != "pre":
        raise ConfigError(f"{name}: bytes are known of a transformer with the norm before each sublayer")
    profiles = []
    for dtype in how.dtypes:
        how.progress(f"kernels in {dtype}")
        profiles.append(kernel_profile(task.by(OURS, dtype)))
    return {"kind": "kernels", **described(name, task, how), "profiles": profiles, "busy": 0.0}


def generation(name: str, task: Task, new_tokens: int, how: How) -> dict[str, Any]:
    """Greedy, one sequence, after the same prompt; a model with a shorter max_seq_len gets a longer one."""
    if not isinstance(task.model, ModelConfig):
        raise ConfigError(f"{name} has no attention and no class in transformers to generate against")
    longest = max(task.model.max_seq_len, PROMPT + new_tokens)
    task = Task(OURS, replace(task.model, max_seq_len=longest), replace(task.train, batch_size=1), new_tokens)
    return {"kind": "generation", **described(name, task, how), **how.compared(task, [OURS, "hf"])}


def scaling(
    name: str, task: Task, how: How, lengths: Sequence[int] = LENGTHS, widths: Sequence[int] = WIDTHS
) -> dict[str, Any]:
    """Ours compared with the floor, at growing length and at growing width."""
    points = []
    for vary, value, at in scaled(task, lengths, widths):
        how.progress(f"{vary} = {value}: {at.train.batch_size}x{at.seq_len}")
        found = how.compared(at, [OURS, FLOOR])
        points.append({"vary": vary, "value": value, "parameters": num_params(at.model), **found})
    return {"kind": "scaling", **described(name, task, how), "points": points, "busy": max(point["busy"] for point in points)}


def scaled(task: Task, lengths: Sequence[int], widths: Sequence[int]) -> Iterator[tuple[str, int, Task]]:
    """The same depth, vocabulary and head width at other lengths and widths; as many tokens in every step."""
    c = task.model
    if not isinstance(c, ModelConfig):
        raise ConfigError("scaling is measured of a transformer; a SimpleLM has no length")

    def at(model: ModelConfig, T: int) -> Task:
        train = replace(task.train, seq_len=T, batch_size=max(1, TOKENS // T))
        return Task(OURS, replace(model, max_seq_len=T), train)

    for T in lengths:
        yield "T", T, at(c, T)
    for C in widths:
        heads = max(1, C // c.head_dim)
        kv_heads = max(1, heads * c.num_kv_heads // c.num_heads)
        kv_heads = kv_heads if heads % kv_heads == 0 else heads
        ffn = max(1, c.intermediate_dim * C // c.hidden_dim)
        wide = replace(c, hidden_dim=C, intermediate_dim=ffn, num_heads=heads, num_kv_heads=kv_heads)
        yield "C", C, at(wide, FIXED_LENGTH)
