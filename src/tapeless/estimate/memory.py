"""The memory of a run by part, and of everything that it does besides its steps.

    step            parameters, gradients, optimizer state, their moving average, the copy in bfloat16, saved activations,
                    logits, working buffers, all from the dry run; and what libraries and compiled kernels take when they
                    are first used; and what a captured evaluation owns, which the steps after it find there
    evaluation      the same forward on its own windows
    saving          the copy of a checkpoint that is being written, besides steps and evaluations. No run needs it: where it
                    does not fit, training waits instead (training/checkpoint_writer.py)
    gradient check  before the first step, on the host: a model in float64 (16 bytes a parameter), another in complex128 (16),
                    two directions (16), the current one and the one before (16), and its own libraries

A model that is many times too large is refused by its weights and activations alone: its dry run would take long.
Tested by: tests/estimate/test_memory.py, acceptance/estimate.py."""

from typing import NamedTuple

import torch

from tapeless.config import AnyModelConfig, ModelConfig, TrainConfig
from tapeless.estimate.dry_run import dry_run, saved_of
from tapeless.estimate.target import Target
from tapeless.kernels.choose import choose, planned
from tapeless.model.build import num_params
from tapeless.training.resources import available_bytes, resident_bytes
from tapeless.verify.first_batch import CHECKED

MIB = 2**20
# Of models so small that little else is there, above a process that has loaded its libraries and used none of them. The CPU
# kernels' were measured as 24 (float32) and 38; what the C library keeps of larger models, unseen by the dry run, is added.
LIBRARIES = {
    ("cpu", "float32"): 40 * MIB,
    ("cpu", "bfloat16"): 40 * MIB,
    ("reference", "float32"): 25 * MIB,
    ("reference", "bfloat16"): 38 * MIB,
    ("reference", "float64"): 25 * MIB,
}
OF_A_GPU = 32 * MIB  # the workspace of its matmul library, for each of the streams that it is called on
JUDGE, OF_THE_CHECK = 64, 64 * MIB  # bytes a parameter, and in all
FAR = 4  # times what is free: beyond, no detail can make it fit


class Memory(NamedTuple):
    device: str
    ops: str
    parts: dict[str, int]  # of a step's peak, which is their sum; bytes, as everything here
    phases: dict[str, int]  # what the run does -> its peak above the process before the model is built
    process: int  # what the process has by then; on a GPU 0, where that is on the host
    checkpoint: int  # the tensors of one, on disk

    @property
    def peak(self) -> int:
        """What the run needs."""
        return max(self.phases.values())

    @property
    def saving(self) -> int:
        """The peak of its steps and evaluations while a checkpoint is written from a copy."""
        return self.checkpoint + max(size for name, size in self.phases.items() if name != "gradient check")


def memory_of(config: AnyModelConfig, train: TrainConfig, target: Target | None = None) -> Memory:
    """train: with a seq_len and a dtype. target: the machine, if it is not this one."""
    device, where = torch.device(train.device), target.name if target else train.device
    if isinstance(config, ModelConfig):
        ops = planned(train.ops, device, train.dtype) if target else choose(train.ops, device, train.dtype).ops.name
    else:
        ops = "reference"
    if sum((least := least_parts(config, train, ops)).values()) > FAR * room_of(train, target):
        return Memory(where, ops, least, {"training step": sum(least.values())}, 0, least["parameters"])
    found = dry_run(config, train, ops)
    parts = dict(found.parts)
    parts["working buffers"] = working = max(0, found.step - sum(parts.values()))
    on_host = device.type != "cuda"
    if on_host and ops not in ("cpu", "triton"):
        # The C library keeps fragments of what plain torch frees, about as much again as is needed at a time.
        parts["pieces kept"] = working
    # A graph is captured on a stream of its own.
    parts["libraries"] = libraries(ops, train.dtype) if on_host else OF_A_GPU * (2 if found.graph else 1)
    besides = sum(parts.values()) - found.step
    parts["captured evaluation"] = found.captured_evaluation
    phases = {"training step": sum(parts.values()), "evaluation": found.evaluation + besides}
    if train.verify and on_host and num_params(config) <= CHECKED:
        held = ("parameters", "gradients", "optimizer state", "moving average", "bfloat16 copy", "libraries")
        phases["gradient check"] = sum(parts[name] for name in held) + JUDGE * num_params(config) + OF_THE_CHECK
    parts = {name: size for name, size in parts.items() if size}
    return Memory(where, ops, parts, phases, (resident_bytes() or 0) if on_host else 0, found.checkpoint)


def room_of(train: TrainConfig, target: Target | None) -> int:
    """Free bytes, here or there."""
    return target.room if target else available_bytes(train.device)


def least_parts(config: AnyModelConfig, train: TrainConfig, ops: str) -> dict[str, int]:
    """What no run is without, by formula; of a model that is trained in part, any block may keep nothing."""
    first_block = config.num_layers if isinstance(config, ModelConfig) and (train.freeze or train.lora) else 0
    return {
        "parameters": 4 * num_params(config),
        "saved activations": saved_of(config, train, ops, first_block=first_block),
        "batch": 2 * 8 * train.batch_size * train.grad_accum * (train.seq_len or 1),  # tokens and targets, int64
    }


def libraries(ops: str, dtype: str) -> int:
    """A set of somebody else's is taken for the built-in one, or in float64, which that one has not, for the reference."""
    return next(LIBRARIES[name, dtype] for name in (ops, "cpu", "reference") if (name, dtype) in LIBRARIES)
