"""Every kernel compiles for a real GPU, also on machines without one: the interpreter accepts what the compiler refuses."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Hopper:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

driver.set_active(Hopper())
launch, compiled = JITFunction.run, set()

def compile_only(self, *args, grid, warmup, **options):
    launch(self, *args, grid=grid, warmup=True, **options)
    compiled.add(self.fn.__name__)

JITFunction.run = compile_only

from tapeless.kernels.triton.ops import fp8_ops, triton_ops
from tapeless.verify.cases import cases_of
from tapeless.verify.kernel_update import update_findings

ops = triton_ops()
for case in cases_of(ops):
    if case.family not in ("dropout", "linear"):
        case = case.at(B=2, T=64, H=4, G=2, D=64, C=64, F=128, V=256)
        point = case.inputs(dtype=torch.bfloat16)
        upstream = case.upstream(point)
        _, saved = case.forward(point)
        case.backward(upstream, saved, point, case.new_dparams(point))
list(update_findings(ops, "cpu"))

x, w, dy = (torch.zeros(64, width, dtype=torch.bfloat16) for width in (256, 128, 64))
for op in fp8_ops().ffn_down.values():
    gate_up = x if op.forward.keywords["name"] in ("swiglu", "geglu") else x[:, :128]
    _, saved = op.forward(gate_up, w, None)
    dgate_up = op.backward(dy, saved, w, None, torch.zeros(64, 128), None)
linear = fp8_ops().linear
_, saved = linear.forward(dy, x.t(), None)
linear.backward(x, saved, x.t(), None, None, None)
dq, dk = (torch.zeros(2, heads, 32, 64, dtype=torch.bfloat16) for heads in (4, 2))
fp8_ops().qkv_rope.backward(dq, dk, dk, None, None, None, None, None, theta=1e4)
print(*sorted(compiled))
"""
KERNELS = {
    *(
        "_norm_forward_kernel",
        "_norm_backward_kernel",
        "_add_parts_kernel",
        "_heads_forward_kernel",
        "_heads_backward_kernel",
        "_gate_forward_kernel",
        "_gate_backward_kernel",
    ),
    *(
        "_attention_forward_kernel",
        "_attention_queries_kernel",
        "_attention_keys_kernel",
        "_loss_kernel",
        "_gather_kernel",
        "_scatter_kernel",
        "_adam_kernel",
        "_sums_of_squares_kernel",
    ),
    *("_rows_kernel", "_columns_kernel", "_gradient_kernel", "_fp8_gate_forward_kernel", "_fp8_gate_backward_kernel"),
    "_fp8_heads_backward_kernel",
}


def test_for_hopper(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    found = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    assert set(found.stdout.split()) == KERNELS
