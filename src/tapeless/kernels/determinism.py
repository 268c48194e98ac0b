"""Library calls that give the same bits every time, on a GPU: what `--deterministic` asks for.

The kernels here always do. The library's attention adds up dq in whatever order its blocks end; asked for a fixed order, it
takes longer. On a CPU everything repeats as it is."""

import os

import torch


def enable_determinism() -> None:
    """For the rest of this process. Before the first product, since cuBLAS reads its setting once."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch refuses its products without it
    torch.use_deterministic_algorithms(True)
    # A debugging aid that would come with it, and is a pass over every buffer.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
