"""Capture as a CUDA graph: the kernels of a pass or of a step, replayed without Python and without gaps between them.

Tested by: tests/kernels/triton/test_cuda.py; what is captured runs without a GPU in tests/train/test_captured_step.py."""

import gc
import logging
from collections.abc import Callable
from typing import Any

import torch

from tapeless.ops.op import CapturedCalls

log = logging.getLogger("tapeless")


def capture_graph(run: Callable[[], Any]) -> tuple[Any, CapturedCalls]:
    """OpSet.capture. Capturing computes nothing, so the graph is replayed once."""
    torch.cuda.empty_cache()  # the graph has its own pool; free what the pass before left cached
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.memory_reserved()
    collected = gc.isenabled()
    gc.disable()  # a graph that is collected meanwhile would end this capture
    try:
        # Other threads may call CUDA meanwhile, such as one that writes a checkpoint.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = run()
    finally:
        if collected:
            gc.enable()
    graph.replay()
    nbytes = torch.cuda.memory_reserved() - before
    log.info("captured a CUDA graph, which holds %.0f MiB", nbytes / 2**20)
    return result, CapturedCalls([graph.replay], nbytes)
