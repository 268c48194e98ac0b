"""Where a step's time goes on a GPU: products, attention, each of our own kernels with the bytes that it has to move, and gaps.

Bytes are those that no kernel of its kind can avoid, read and written once each; what is small beside them (statistics, tables
of angles, biases) does not count. A bandwidth is set beside that of a plain copy in the same process.
Tested by: tests/bench/test_kernel_profile.py."""

import time
from collections import defaultdict
from statistics import median
from typing import Any, NamedTuple

import torch

from tapeless.bench.contenders import Ours
from tapeless.bench.floor import products
from tapeless.bench.task import Task, num_params
from tapeless.config import ModelConfig
from tapeless.ops.ffn_gate import GATED

PRODUCTS = ("nvjet", "gemm", "cutlass", "splitK")  # what the libraries call theirs
ATTENTION = ("sdpa", "cudnn", "flash", "attention")
COPIED = 2**30  # bytes
STEPS, TIMED = 3, 10  # under the profiler, and with a clock


class Spent(NamedTuple):
    calls: float  # a step
    seconds: float  # a step


def kernel_bytes(c: ModelConfig, tokens: int, *, fp8: bool) -> dict[str, int]:
    """Kernel -> bytes in a step, of a model with the norm before each sublayer, in bfloat16 but for parameters."""
    N, L, C, F = tokens, c.num_layers, c.hidden_dim, c.intermediate_dim
    heads, params = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, num_params(c)
    up = 2 * F if c.ffn in GATED else F
    found = {
        "_norm_forward_kernel": 2 * N * C * (2 + 4 * 2 * L),  # x, delta, s, n; the first has no delta
        "_norm_backward_kernel": 2 * N * C * (3 + 4 * 2 * L),  # ds, dn, x, dx; the last norm has no ds
        "_heads_forward_kernel": 2 * N * heads * 2 * L,
        "_heads_backward_kernel": 2 * N * heads * 2 * L,
        "_gate_forward_kernel": 2 * N * (up + F) * L,
        "_gate_backward_kernel": 2 * N * (2 * up + 2 * F) * L,  # gate_up, dh, and as many written
        "_loss_kernel": 2 * N * c.vocab_size * 2,
        "_gather_kernel": 2 * N * C * 2,
        "_adam_kernel": params * (7 * 4 + 2),
        "_sums_of_squares_kernel": params * 4,
    }
    if fp8:
        in_blocks = sum(p.weights for p in products(c) if p.name != "head")
        inputs = (2 * C + c.num_heads * c.head_dim) * N * L  # of qkv, out and up
        found |= {
            "_fp8_heads_backward_kernel": (2 + 2) * N * heads * L,
            "_fp8_gate_forward_kernel": N * (2 * up + F) * L,
            "_fp8_gate_backward_kernel": N * (2 * up + 2 * F + 2 * up + F) * L,  # gate_up, dh; dgate_up in both orders, h
            "_rows_kernel": 3 * (inputs + 2 * in_blocks),
            "_columns_kernel": 2 * (inputs + in_blocks),
            "_gradient_kernel": 4 * 2 * C * N * L,
        }
    return found


def kind(kernel: str) -> str:
    """products, attention, or the kernel's own name where it is one of ours, else `other`."""
    if kernel.endswith("_kernel") and kernel.startswith("_"):
        return "attention" if "attention" in kernel else kernel
    lower = kernel.lower()
    if any(word.lower() in lower for word in PRODUCTS):
        return "products"
    return "attention" if any(word in lower for word in ATTENTION) else "other"


def copy_bandwidth(device: str) -> float:
    """Bytes a second, read and written together."""
    source = torch.empty(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(TIMED):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * COPIED / min(seconds)


def spent_by_kind(step: Any) -> dict[str, Spent]:
    """One unit of work, kernel by kernel, under torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    calls: dict[str, float] = defaultdict(float)
    seconds: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        calls[kind(event.key)] += event.count / STEPS
        seconds[kind(event.key)] += event.self_device_time_total / 1e6 / STEPS
    return {name: Spent(calls[name], seconds[name]) for name in seconds if seconds[name] > 0}


def kernel_profile(task: Task) -> dict[str, Any]:
    assert isinstance(task.model, ModelConfig)
    bandwidth = copy_bandwidth(task.train.device)
    ours, clock = Ours(task), []
    for step in range(3 + TIMED):
        ours.prepare(step)
        torch.cuda.synchronize()
        start = time.perf_counter()
        ours.step()
        clock.append(time.perf_counter() - start)
    spent = spent_by_kind(ours.step)
    moved = kernel_bytes(task.model, task.tokens, fp8=task.train.dtype == "fp8")
    step_s = median(clock[3:])
    return {
        "dtype": task.train.dtype,
        "step_s": step_s,
        "gaps_s": max(0.0, step_s - sum(each.seconds for each in spent.values())),
        "copy_bytes_per_s": bandwidth,
        "kernels": {
            name: {
                "calls": each.calls,
                "seconds": each.seconds,
                "bytes": moved.get(name),
                "of_copy": moved[name] / each.seconds / bandwidth if name in moved else None,
            }
            for name, each in sorted(spent.items(), key=lambda item: -item[1].seconds)
        },
    }
