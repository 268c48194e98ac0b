"""Model flops utilization: what share of a GPU's bfloat16 peak goes into the model's own products.

    flops of a step = tokens (6 weights + 6 L H D T)
    weights: every matrix that tokens are multiplied with (floor.py); the input embedding is only looked up
6 are 2 forward and 4 backward for each weight and token; the second term is causal attention, whose upper half is not computed:
2 T H D forward and 4 backward for each layer and token. Peaks are the makers' figures for dense products without sparsity. A
GPU that is not listed has no utilization, rather than a wrong one.
Tested by: tests/bench/test_mfu.py."""

from tapeless.bench.floor import flops
from tapeless.bench.task import Task
from tapeless.config import AnyModelConfig, ModelConfig

PEAK = {"H100": 989e12, "H200": 989e12, "GH200": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}  # flop/s


def peak_of(gpu: str) -> float | None:
    """By a word of the device's name, such as NVIDIA H100 80GB HBM3. PCIe and NVL boards and slices (MIG) have less."""
    if any(word in gpu.lower() for word in ("pcie", "nvl", "mig")):
        return None
    return next((PEAK[word] for word in gpu.replace("-", " ").split() if word in PEAK), None)


def step_flops(c: AnyModelConfig, tokens: int, seq_len: int) -> int:
    attention = 0
    if isinstance(c, ModelConfig):
        attention = 6 * tokens * c.num_layers * c.num_heads * c.head_dim * seq_len
    return flops(c, tokens) + attention


def utilization(task: Task, seconds: float, gpu: str) -> float | None:
    peak = peak_of(gpu)
    return None if peak is None else step_flops(task.model, task.tokens, task.seq_len) / seconds / peak
