"""A look at every call that torch's dispatcher sees.
Tested by: tests/kernels/test_dispatch.py."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PROMOTED = torch.ops.aten.promote_types.default  # of dtypes; no tensor is in it


class DispatchObserver(TorchDispatchMode):
    """torch's own mode, but for one thing: torch hides a mode from its compiler, which it loads to do so, 120 MB and seconds
    for nothing."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def computes(function: Any) -> bool:
    """Whether a call of torch reads or writes any values: not one that makes a view, or memory for others to write."""
    return not (function.is_view or "empty" in function.name() or function is PROMOTED)


def writes(function: Any) -> bool:
    """Whether its result is one of its arguments."""
    return function._schema.is_mutable
