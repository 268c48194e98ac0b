"""A look at every call that torch's dispatcher sees.
Judged by: tests/kernels/test_dispatch.py."""

from torch.utils._python_dispatch import TorchDispatchMode


class Onlooker(TorchDispatchMode):
    """torch's own mode, but for one thing: torch hides a mode from its compiler, which it loads to do so, 120 MB and seconds
    for nothing."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
