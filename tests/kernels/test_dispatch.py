"""A look at calls costs no compiler."""

import subprocess
import sys

SEES = """
import sys, torch
from tapeless.kernels.dispatch import DispatchObserver

class Names(DispatchObserver):
    def __torch_dispatch__(self, func, types, args=(), options=None):
        names.append(func.name())
        return func(*args, **(options or {}))

names = []
with Names():
    torch.ones(3).add_(1)
assert names == ["aten::ones", "aten::add_.Tensor"], names
assert "torch._dynamo" not in sys.modules
"""


def test_it_sees_every_call_and_loads_no_compiler():
    subprocess.run([sys.executable, "-c", SEES], check=True)
