"""Bitwise repeatable library calls on a GPU, for `--deterministic`.

The kernels of this package are always repeatable. The library's attention sums dq in the order in which its blocks finish; a
fixed order takes longer. On a CPU everything is repeatable without this."""

import os

import torch


def enable_determinism() -> None:
    """For the rest of this process. Call it before the first matmul, since cuBLAS reads its setting once."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by torch for matmuls
    torch.use_deterministic_algorithms(True)
    # A debugging aid that is on by default then, and costs a pass over every buffer.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
