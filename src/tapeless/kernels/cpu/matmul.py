"""Matmuls with weights, and which of torch's libraries computes them.

torch uses MKL in float32 and oneDNN in bfloat16. On AMD CPUs with AVX-512 oneDNN is faster in float32 too, by 10 to 50 % for
matmuls with weights, though not for their gradients (docs/log.md). Its only entry point, made for torch's compiler, returns a
new tensor; the copy costs less than the gain.
The choice depends on the machine and the shapes alone, so results on one machine are bitwise repeatable.
Tested by: tests/kernels/cpu/test_cpu_matmul.py."""

import llvmlite.binding as llvm
import torch
from torch import Tensor

from tapeless.kernels.cpu.capture import launch

ROWS = 128  # oneDNN caches data for each shape, up to megabytes: varying numbers of rows must not give many shapes
LEAST = 2**25  # multiplications; below, the second call costs more than is gained
LARGEST = 2**24  # bytes of a result; a larger one would double memory or be mapped anew each time, for little gain


def _onednn_is_faster() -> bool:
    zen = llvm.get_host_cpu_name().startswith("znver") and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return zen and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


ONEDNN = _onednn_is_faster()


def by_onednn(M: int, K: int, N: int, dtype: torch.dtype) -> bool:
    """Whether oneDNN computes (M, K) @ (K, N)."""
    fits = M % ROWS == 0 and M * K * N >= LEAST and M * N * dtype.itemsize <= LARGEST
    return ONEDNN and fits and dtype == torch.float32


def _onednn_matmul(a: Tensor, bt: Tensor, out: Tensor, bias: Tensor | None) -> None:  # (M, K), (N, K), (M, N), (N,)
    out.copy_(torch.ops.mkldnn._linear_pointwise(a, bt, bias, "none", [], ""))


# The result before it is copied, and the weights in oneDNN's own layout: see kernels/dry.py.
_onednn_matmul.library_bytes = lambda a, bt, out, bias: out.nbytes + bt.nbytes  # type: ignore[attr-defined]


def matmul(
    a: Tensor,  # (M, K)
    b: Tensor,  # (K, N)
    out: Tensor,  # (M, N)
    bias: Tensor | None = None,  # (N,)
) -> None:
    if by_onednn(len(a), len(b), b.shape[1], out.dtype) and (bias is None or bias.is_contiguous()):
        launch(_onednn_matmul, a, b.t(), out, bias)
    elif bias is None:
        launch(torch.mm, a, b, out=out)
    else:
        launch(torch.addmm, bias, a, b, out=out)
