"""Every private API of torch, numba and llvmlite that this package uses, in one table.

A release of those libraries may change them without notice. If there is an alternative, a missing one is handled; the rest
is required, and an installed version without it fails the test of this table before anything else. To try another version:

    uv run --with torch==2.11.0 --with numba --with-editable . python -m pytest tests/kernels/test_private_api.py tests/kernels

Tested by: tests/kernels/test_private_api.py."""

from collections.abc import Iterable
from functools import reduce
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
except ImportError as error:
    raise ImportError(f"torch {torch.__version__} is not supported, it lacks an API that tapeless needs: {error}") from error


class PrivateAPI(NamedTuple):
    path: str  # dotted
    used_by: str  # file under src/tapeless
    without: str = ""  # what happens if it is missing; empty: required


PRIVATE_APIS = (
    PrivateAPI("torch.utils._python_dispatch.TorchDispatchMode", "kernels/private_api.py"),
    PrivateAPI("torch.utils._pytree.tree_leaves", "kernels/private_api.py"),
    PrivateAPI("torch.utils._pytree.tree_map", "kernels/private_api.py"),
    PrivateAPI("torch.UntypedStorage._cdata", "kernels/private_api.py"),
    PrivateAPI("torch.ops.aten.add.Tensor._schema", "kernels/dispatch.py"),
    PrivateAPI("torch.Tensor._base", "kernels/cpu/jit.py"),
    PrivateAPI("torch.Tensor._base", "optim/flat.py"),
    PrivateAPI("torch.Tensor._version", "model/params.py"),
    PrivateAPI("torch.ops.mkldnn._linear_pointwise", "kernels/cpu/matmul.py", "matmuls by torch.mm"),
    PrivateAPI("torch._scaled_mm", "kernels/triton/fp8_linear.py", "dtype fp8 is refused"),
    *(
        PrivateAPI(
            f"torch.ops.aten.{name}{suffix}", "kernels/triton/library_attention.py", "the attention kernel of this package"
        )
        for name in ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention")
        for suffix in ("", "_backward")
    ),
    PrivateAPI("numba.core.caching._Cache", "kernels/cpu/kernel_cache.py", "the reference ops"),
    PrivateAPI("numba.core.compiler.CompileResult", "kernels/cpu/kernel_cache.py", "the reference ops"),
    PrivateAPI("numba.core.serialize.dumps", "kernels/cpu/kernel_cache.py", "the reference ops"),
    PrivateAPI("numba.core.registry.cpu_target.target_context", "kernels/cpu/jit.py", "the reference ops"),
    PrivateAPI("numba.core.cgutils.for_range_slice", "kernels/cpu/rows.py", "the reference ops"),
    PrivateAPI("numba.core.cgutils.alloca_once", "kernels/cpu/rows.py", "the reference ops"),
    PrivateAPI("numba.core.cgutils.unpack_tuple", "kernels/cpu/rows.py", "the reference ops"),
    PrivateAPI("llvmlite.ir.IRBuilder", "kernels/cpu/tile.py", "the reference ops"),
    PrivateAPI("llvmlite.binding.get_host_cpu_features", "kernels/cpu/tile.py", "the reference ops"),
)


def find(path: str) -> Any:
    """The object at a dotted path; AttributeError or ImportError if it is missing."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            module = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        return reduce(getattr, parts[length:], module)
    raise ImportError(f"there is no {path}")


def exists(path: str) -> bool:
    try:
        find(path)
    except (AttributeError, ImportError):
        return False
    return True


def storage_id(storage: torch.UntypedStorage) -> int:
    """Equal for all views of one storage, also on the meta device, where nothing has an address."""
    return storage._cdata


def distinct_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the tensors among these objects; the same view of the same storage counts once."""
    found = (x for x in tensors if isinstance(x, Tensor))
    return sum({(storage_id(x.untyped_storage()), x.storage_offset(), x.shape): x.nbytes for x in found}.values())
