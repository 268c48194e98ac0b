"""The time of a step on a GPU that is not here, computed from what the step does and what the GPU has: nothing is measured.

    seconds = 16-bit FLOPs / (MATMUL peak) + 8-bit FLOPs / (MATMUL_FP8 peak of fp8)
              + attention FLOPs / (ATTENTION peak min(1, D / 128)) + bytes / (COPY bandwidth) + FIXED
FLOPs are the model's (model/build.py), and its forward once more where whole blocks are recomputed. Bytes are those that the
kernels of this package read and write, counted by a dry run. The shares are those of one H200 with six measured steps; other
GPUs are assumed to reach the same. They are compared with those steps by acceptance/estimate_elsewhere.py.
Tested by: tests/estimate/test_computed_time.py."""

from dataclasses import replace
from typing import Any

from tapeless.config import AnyModelConfig, ModelConfig, TrainConfig
from tapeless.estimate.dry_run import kernel_bytes
from tapeless.estimate.target import Target
from tapeless.model.block import build_blocks
from tapeless.model.build import step_flops

MATMUL, MATMUL_FP8 = 0.635, 0.52
ATTENTION, WIDE = 0.425, 128  # of heads at least so wide: the work beside the matmuls is per key, not per feature
COPY = 0.875  # of the bandwidth: a copy's measured 4.2 of 4.8 TB/s
FIXED = 0.38e-3  # of each step: launches and the host. A step of llama-tiny, which computes almost nothing
ERROR = 0.05  # at most, of the steps that it was compared with
HOW = (
    "computed, not measured: FLOPs by the peak of {}, bytes by its bandwidth, at the shares that an H200 reached. Its measured "
    f"steps of llama-124m, llama-350m and llama-1b, in bfloat16 and fp8, are within {ERROR:.0%} of this"
)


class NotComputable(Exception):
    """No formula for this run's time."""


def computed_time(config: AnyModelConfig, train: TrainConfig, target: Target, ops: str, steps: int) -> dict[str, Any]:
    """As `time` of a record. ops: the name of the set."""
    gpu, T = target.gpu, train.seq_len or 1
    if gpu is None:
        raise NotComputable("the time depends on the GPU; name one, such as --device h100")
    if ops not in ("triton", "triton-fp8") or train.dtype == "float32" or not isinstance(config, ModelConfig):
        raise NotComputable("the formula is for transformers with the built-in kernels in bfloat16 or fp8: --dtype bfloat16")
    if train.freeze or train.lora:
        raise NotComputable("the formula is for runs that train all parameters; with frozen ones a step takes less")
    if train.optimizer not in ("adam", "adamw"):
        raise NotComputable(f"the formula is for updates by the built-in kernel, which {train.optimizer} has not")
    tokens, again = train.batch_size * T, 4 / 3 if train.recompute == "full" else 1.0  # the blocks' forward
    attention = 3 * tokens * sum(part.extra_flops(T) for block in build_blocks(config) for part in block.sublayers)
    head = 6 * tokens * config.vocab_size * config.hidden_dim
    blocks = step_flops(config, tokens, T) - attention - head
    of_blocks = MATMUL_FP8 * gpu.fp8 if train.dtype == "fp8" and gpu.fp8 else MATMUL * gpu.bf16
    of_attention = ATTENTION * gpu.bf16 * min(1.0, config.head_dim / WIDE)
    computing = again * (attention / of_attention + blocks / of_blocks) + head / (MATMUL * gpu.bf16)
    # Of one micro-batch with the update, and of two, since each moves the same.
    one, two = (sum(kernel_bytes(config, replace(train, grad_accum=k)).values()) for k in (1, 2))
    moved = one + (train.grad_accum - 1) * (two - one)
    step = train.grad_accum * computing + moved / (COPY * gpu.bandwidth) + FIXED
    return {"step": step, "total": steps * step, "parts": {"steps": steps * step}, "how": HOW.format(target.name)}
