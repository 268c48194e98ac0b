"""The built-in ops on torch's meta device: they allocate what they would allocate, and compute nothing.

The launchers of kernels/cpu and kernels/triton run as they are. Tensors on the meta device have a shape and no memory, `launch`
of either folder starts no kernel, and a workspace lends meta tensors. The reference ops need nothing of this: plain torch runs
on the meta device. See estimate/dry_run.py.
Tested by: tests/kernels/test_dry.py, block for block against a real step of the CPU kernels."""

import importlib.util
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tapeless.kernels.dispatch import DispatchObserver, computes, writes
from tapeless.kernels.workspace import LARGEST_CAPTURE, NUMPY, Workspace
from tapeless.ops.op import CapturedCalls, Op, OpSet

META = torch.device("meta")
COMPILER_SETTING = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def environment_restored() -> Iterator[None]:
    """Around work on the meta device. The first arithmetic there imports torch's compiler, which writes its cache directory
    into the environment."""
    given = COMPILER_SETTING in os.environ
    try:
        yield
    finally:
        if not given:
            os.environ.pop(COMPILER_SETTING, None)


class DryWorkspace(Workspace):
    """Counts blocks as its parent does, and allocates none."""

    device = META

    def __init__(self) -> None:
        super().__init__()
        self.lent = 0  # bytes
        self.library = 0  # bytes that a library allocates for the largest matmul; the C library keeps them
        self.captured = 0  # bytes that captures own
        self._lent_in_capture: dict[int, np.ndarray] | None = None

    @property
    def idle(self) -> int:
        """Bytes that are held in addition to the lent ones: idle blocks, scratch, and what libraries and captures own."""
        return self.allocated - self.lent + self.library + self.captured

    def _new_block(self, numel: int, dtype: torch.dtype) -> np.ndarray:
        return np.broadcast_to(np.empty((), NUMPY[dtype]), numel)

    def _lend(self, block: np.ndarray, free: list[np.ndarray], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.lent += block.nbytes
        if self._lent_in_capture is not None:
            self._lent_in_capture[id(block)] = block
        tensor = torch.empty(shape, dtype=dtype, device=META)
        ticket = weakref.ref(tensor.untyped_storage(), self._take_back)
        self._lent[id(ticket)] = ticket, free, block
        return tensor

    def _take_back(self, ticket: Any) -> None:
        self.lent -= self._lent[id(ticket)][2].nbytes
        super()._take_back(ticket)

    def launched(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        library_bytes = getattr(function, "library_bytes", None)
        if library_bytes is not None:
            self.library = max(self.library, library_bytes(*args, **options))

    def capture(self, run: Callable[[], Any]) -> tuple[Any, CapturedCalls | str]:
        """OpSet.capture: counts what a capture of the pass would own. There are no calls to replay."""
        self._lent_in_capture = lent = dict[int, np.ndarray]()
        with _Allocations(lambda: sum(block.nbytes for block in lent.values())) as allocations:
            result = run()
        nbytes = allocations.nbytes + allocations.lent()
        self._lent_in_capture = None
        if nbytes > LARGEST_CAPTURE:
            return result, f"it would own {nbytes / 2**20:,.0f} MiB"
        self.release_idle()
        self.captured += nbytes
        return result, CapturedCalls([], nbytes)


class _Allocations(DispatchObserver):
    """Counts the bytes of all tensors that torch computes, and references them as a capture does (cpu/capture.py): until it
    owns too much. Also a capture that fails therefore raises the peak."""

    def __init__(self, lent: Callable[[], int]):
        """lent: bytes of the blocks that the capture owns besides."""
        super().__init__()
        self.lent, self.nbytes = lent, 0
        self._owned: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        result = function(*args, **(options or {}))
        if isinstance(result, Tensor) and computes(function) and not writes(function):
            self.nbytes += result.nbytes
            self._owned.append(result)
            if self.nbytes + self.lent() > LARGEST_CAPTURE:
                self._owned.clear()
        return result


class DryOps(NamedTuple):
    ops: OpSet
    workspace: DryWorkspace | None
    logits_rows: Callable[[int, int], int]  # (N, V): rows of logits that exist at a time


def dry_ops(name: str) -> DryOps | None:
    """A built-in set for a model on the meta device; None for any other set, which has to run there by itself."""
    if name == "cpu":
        from tapeless.kernels.cpu.linear_cross_entropy import rows_of_logits

        workspace = DryWorkspace()
        return DryOps(_dry_cpu_ops(workspace), workspace, rows_of_logits)
    if name in ("triton", "triton-fp8"):
        _, launchers, logits_rows = _of_triton()
        dry = launchers.triton_ops() if name == "triton" else launchers.fp8_ops()
        return DryOps(replace(dry, capture=None), None, logits_rows)
    return None


def count_kernel_bytes() -> AbstractContextManager[dict[str, int]]:
    """kernels/triton/launch.py, of the launchers of dry_ops()."""
    return _of_triton()[0].count_kernel_bytes()


@cache
def _of_triton() -> tuple[Any, Any, Callable[[int, int], int]]:
    """kernels/triton: launch, ops, rows_of_logits. Launchers need two formulas of Triton, which is for Linux only, and its
    compiler only to launch. Where it is not installed, the formulas stand in for it while these modules are imported, which are
    then this function's own: everything else still finds that Triton is missing."""
    with nullcontext() if _installed("triton") else _formulas_of_triton():
        from tapeless.kernels.triton import launch, ops
        from tapeless.kernels.triton.linear_cross_entropy import rows_of_logits
    return launch, ops, rows_of_logits


def _installed(package: str) -> bool:
    return sys.modules.get(package) is not None or importlib.util.find_spec(package) is not None


@contextmanager
def _formulas_of_triton() -> Iterator[None]:
    before = sys.modules.copy()
    sys.modules["triton"], sys.modules["triton.language"] = _Formulas("triton"), _Formulas("triton.language")
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.startswith(("triton", "tapeless.kernels.triton"))]:
            del sys.modules[name]
            if name in before:
                sys.modules[name] = before[name]


class _Formulas(ModuleType):
    """Kernels stay Python functions, constants numbers."""

    @staticmethod
    def jit(kernel: Any, **_: Any) -> Any:
        kernel.fn = kernel
        return kernel

    @staticmethod
    def constexpr(value: Any) -> Any:
        return value

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)

    @staticmethod
    def next_power_of_2(n: int) -> int:
        return 1 << (n - 1).bit_length()


def _dry_cpu_ops(workspace: DryWorkspace) -> OpSet:
    from tapeless.kernels.cpu.capture import launches_to
    from tapeless.kernels.cpu.ops import cpu_ops

    def unlaunched(run: Callable[..., Any] | None) -> Any:
        def dry(*args: Any, **options: Any) -> Any:
            with launches_to(workspace):
                return run(*args, **options)  # type: ignore[misc]

        return run and dry

    def change(_: str, op: Op) -> Op:
        return op._replace(**{name: unlaunched(getattr(op, name)) for name in ("forward", "backward", "both", "backward_dw")})

    ops = cpu_ops(workspace)
    assert ops.non_accumulating is not None
    return replace(
        ops.map(change),
        non_accumulating=ops.non_accumulating.map(change),
        capture=workspace.capture,
        adam_update=lambda *args: None,
        grad_norm=lambda grads: grads.new_empty((), dtype=torch.float64),
    )
