"""Observers of every call that torch's dispatcher sees.
Tested by: tests/kernels/test_dispatch.py."""

from typing import Any

import torch

from tapeless.kernels.private_api import TorchDispatchMode

PROMOTED = torch.ops.aten.promote_types.default  # computes dtypes, no tensor


class DispatchObserver(TorchDispatchMode):
    """TorchDispatchMode that does not load torch's compiler, 120 MB and seconds of imports, to hide the mode from it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def computes(function: Any) -> bool:
    """Whether a call of torch reads or writes values, unlike one that makes a view or allocates uninitialised memory."""
    return not (function.is_view or "empty" in function.name() or function is PROMOTED)


def writes(function: Any) -> bool:
    """Whether it writes into one of its arguments."""
    return function._schema.is_mutable
