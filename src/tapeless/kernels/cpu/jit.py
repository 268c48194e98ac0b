"""How the kernels are compiled: Numba's settings, the cache on disk, threads, and bfloat16.

- Flags. Operations may be contracted, reassociated and divided by reciprocals, but NaN and infinity keep their meaning: NaN in
  must give NaN out. Hence the named flags, not `fastmath=True`.
- Cache. A kernel is compiled again when any function changes that it calls: the name of the cache folder is a hash of all
  sources, and of Numba's settings. What is in it: kernel_cache.py.
- Inlined functions. A function that kernels call is always compiled into each of them. By default, a freshly compiled kernel
  calls the first copy in the process, and a cached one its own copy: vectorised differently, with other last bits, so a resumed
  run would differ from an uninterrupted one. Inlined functions have no Python entry point, which would take a sixth of the
  compile time: calling one from Python crashes; use `function.py_func`.
- Threads. Numba and torch each have a thread pool, and an idle pool spins for a while, which slows the other. Both use GNU
  OpenMP: if torch's copy is loaded first, Numba's kernels run on torch's threads.
- bfloat16. Numba does not have it; it is uint16 there, the upper half of a float32.
Tested by: tests/kernels/cpu/test_cached.py, tests/kernels/test_cpu.py."""

import ctypes
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import event
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload
from torch import Tensor

from tapeless.kernels.cpu.kernel_cache import KernelCache
from tapeless.kernels.workspace import NUMPY
from tapeless.progress import busy

log = logging.getLogger("tapeless")

OLD = 90 * 24 * 3600  # seconds
FLAGS = {"contract", "reassoc", "arcp", "afn"}
OPTIONS = {
    "error_model": "numpy",  # x / 0 as in IEEE 754, without a check that would prevent vectorisation
    "nogil": True,
    "no_cfunc_wrapper": True,  # no entry point for C, which nothing uses: 5 % of the compile time
}
# Numba's settings that change the code it makes. It does not compile again when they change: the cache folder is named by them.
SETTINGS: tuple[str, ...] = (
    "OPT",
    "LOOP_VECTORIZE",
    "SLP_VECTORIZE",
    "BOUNDSCHECK",
    "DISABLE_JIT",
    "DISABLE_INTEL_SVML",
    "USING_SVML",
)
SETTINGS += ("LLVM_REFPRUNE_PASS", "LLVM_REFPRUNE_FLAGS", "PARFOR_MAX_TUPLE_SIZE", "EXTEND_VARIABLE_LIFETIMES")


def settings() -> dict[str, str]:
    """What the code of the kernels depends on beside their sources: versions, target, and settings."""
    _, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    found = {"version": numba.__version__, "llvmlite": llvmlite.__version__}
    found |= {"cpu": cpu, "cpu_features": hashlib.sha256(features.encode()).hexdigest()[:16]}
    return found | {name: str(getattr(numba.config, name, None)) for name in SETTINGS}


def _share_threads() -> None:
    """Load torch's OpenMP for Numba, unless NUMBA_THREADING_LAYER selects another layer. If torch ships none, each keeps its
    pool."""
    libraries = list((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    if libraries and numba.config.THREADING_LAYER == "default":
        ctypes.CDLL(str(libraries[0]), mode=ctypes.RTLD_GLOBAL)
        numba.config.THREADING_LAYER = "omp"


def _remove_old(folder: Path) -> None:
    """Each version of the sources has its own folder; creating one removes those that have not been used for long."""
    if not folder.exists():
        for other in folder.parent.glob("kernels-*"):
            if time.time() - other.stat().st_mtime > OLD:
                shutil.rmtree(other, ignore_errors=True)


def cache_folder() -> Path | None:
    """Of exactly these sources and settings; None without a home. A folder for all users, such as /tmp, would be one where
    others can put their code."""
    contents = [source.read_bytes() for source in sorted(Path(__file__).parent.glob("*.py"))]
    name = f"kernels-{hashlib.sha256(b''.join([*contents, repr(settings()).encode()])).hexdigest()[:16]}"
    override = os.environ.get("NUMBA_CACHE_DIR")
    try:
        folder = Path(override or Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "tapeless") / name
    except RuntimeError:
        return None
    with suppress(OSError):  # KernelCache warns, if a kernel is compiled
        _remove_old(folder)
        folder.mkdir(parents=True, exist_ok=True)
    return folder


if numba.config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set, and the CPU kernels run only compiled")
_share_threads()
_FOLDER = cache_folder()
cpu_target.target_context.refresh()  # loads 40 MB of modules now, so that they are not counted as memory of the model


def use_torchs_threads() -> None:
    """Set Numba's number of threads to torch's. Numba stores its number per Python thread, and torch's may change at any time:
    this runs at the beginning of every pass through a model. The first call starts Numba's threads and sets OpenMP, which is
    torch's own here, to all cores: torch's number is restored."""
    threads = torch.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


class _Compiling(event.Listener):
    """Shows which kernel is being compiled; one that is loaded from the cache takes no time. Numba reports every function of
    the process, also those of others."""

    def __init__(self) -> None:
        self.count, self.depth, self.begin = 0, 0, 0.0
        self.stack = ExitStack()

    def on_start(self, compiling: event.Event) -> None:
        if not _is_ours(compiling):
            return
        self.depth += 1
        if self.depth > 1:  # a function that a kernel calls
            return
        if not self.count:
            where = f"cached in {_FOLDER}" if _FOLDER else "not cached, since there is no home directory"
            log.warning("first use of these CPU kernels: each is compiled when it is first needed, and %s", where)
            self.begin = time.monotonic()
        self.count += 1
        kernel = compiling.data["dispatcher"].py_func
        name = f"{kernel.__module__.rpartition('.')[2]}, {kernel.__name__.strip('_')}"
        self.stack.enter_context(busy(f"compiling CPU kernel {self.count} ({name})", since=self.begin))

    def on_end(self, compiled: event.Event) -> None:
        if not _is_ours(compiled):
            return
        self.depth -= 1
        if not self.depth:
            self.stack.close()


def _is_ours(compiling: event.Event) -> bool:
    return bool(compiling.data["dispatcher"].py_func.__module__.startswith("tapeless."))


event.register("numba:compile", _Compiling())


def _compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        dispatcher = numba.njit(**OPTIONS, **options)(function)
        if _FOLDER is not None:
            dispatcher._cache = KernelCache(function, _FOLDER)
        return dispatcher

    return decorate


kernel = _compiled(parallel=True, fastmath=FLAGS)  # its `prange` loops run on all threads
compiled = _compiled(fastmath=FLAGS)  # runs on one thread; kernels that it calls run on all
INLINED = OPTIONS | {"forceinline": True, "no_cpython_wrapper": True}
inlined = numba.njit(fastmath=FLAGS, **INLINED)  # into kernels
exact = numba.njit(fastmath={"contract"}, **INLINED)  # likewise, where the order of operations matters


def array(x: Tensor) -> np.ndarray:
    """A numpy array of the same memory, bfloat16 as uint16.

    Two calls of torch for each argument of each kernel would take as long as a small kernel: tensors of a workspace and views
    of the flat buffers store their array in an attribute, valid while the memory stays at its address. A tensor on the meta
    device becomes an array of its shape that takes no memory (kernels/dry.py)."""
    held = getattr(x, "as_array", None)
    if held is not None and held[0] == x.data_ptr() and held[1].shape == x.shape:
        return held[1]
    if x.is_meta:
        return np.broadcast_to(np.empty((), NUMPY.get(x.dtype, np.int64)), x.shape)
    seen = (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x.detach()).numpy()
    if x._base is not None and x.is_floating_point():
        x.as_array = x.data_ptr(), seen  # type: ignore[attr-defined]
    return seen


def matrix(x: Tensor) -> np.ndarray:  # (..., C) -> (N, C)
    return array(x if x.is_contiguous() else x.contiguous()).reshape(-1, x.shape[-1])


FLOAT, BITS, HALF = ir.FloatType(), ir.IntType(32), ir.IntType(16)


@intrinsic
def wide(typingctx: Any, x: Any) -> Any:
    """An element as float32: itself, or the bits of a bfloat16 followed by sixteen zeros. A word of two stays a word."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if x in (types.float32, types.int32):
            return args[0]
        return builder.bitcast(builder.shl(builder.zext(args[0], BITS), BITS(16)), FLOAT)

    return (types.int32 if x == types.int32 else types.float32)(x), codegen


@intrinsic
def narrow(typingctx: Any, x: Any) -> Any:
    """The bits of the nearest bfloat16 of a float32, ties to even; NaN stays NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], BITS)
        is_odd = builder.and_(builder.lshr(bits, BITS(16)), BITS(1))
        rounded = builder.add(builder.add(bits, BITS(0x7FFF)), is_odd)
        nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.trunc(builder.lshr(builder.select(nan, BITS(0x7FC00000), rounded), BITS(16)), HALF)

    return types.uint16(types.float32), codegen


def put(row: np.ndarray, i: int, x: float) -> None:
    """row[i] = x, rounded to the dtype of the row."""
    raise TypeError("put is compiled into kernels; Python cannot call it")


@overload(put)
def _put(row, i, x):
    def rounded(row, i, x):
        row[i] = narrow(x)

    def plain(row, i, x):
        row[i] = x

    return rounded if row.dtype == types.uint16 else plain


@intrinsic
def bare(typingctx: Any, x: Any) -> Any:
    """The same array without a reference count: threads that slice one array would contend for its counter. Attention took
    twice as long."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(x)(context, builder, args[0])
        array.meminfo = ir.Constant(array.meminfo.type, None)
        return array._getvalue()

    return x(x), codegen
