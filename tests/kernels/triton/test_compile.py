"""Every kernel compiles for a real GPU, also on machines without one: the interpreter accepts what the compiler refuses."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

HOPPER = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Hopper:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

driver.set_active(Hopper())
launch, compiled = JITFunction.run, {}  # (kernel, its options) -> what the compiler gives

def compile_only(self, *args, grid, warmup, **options):
    compiled[self.fn.__name__, *options.items()] = launch(self, *args, grid=grid, warmup=True, **options)

JITFunction.run = compile_only
"""
PROGRAM = """
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
print(*{name for name, *_ in compiled})
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

# Steps of models of real widths, whose weights are never touched, and a draw; then a line for each kernel: its variant, the
# rows of a program, the generation of its matmul instructions, and how it spreads rows that it sums over threads.
GENERATION = r"""
import json, re
from types import SimpleNamespace
from tapeless.config import ModelConfig
from tapeless.kernels.triton.decode import decoder
from tapeless.kernels.triton.sample import sample
from tapeless.model.params import FlatLayout
from tapeless.model.transformer import transformer_specs
from tapeless.ops.op import SlotState

def step(R, C, H, F, S, V=50304, **choices):
    config = ModelConfig(vocab_size=V, hidden_dim=C, num_layers=1, num_heads=H, intermediate_dim=F, max_seq_len=S, **choices)
    layout = FlatLayout(transformer_specs(config))
    run = decoder(config, layout.spans, torch.empty(layout.numel, dtype=torch.bfloat16))
    cache = [torch.empty(1, 65, config.num_kv_heads, S, config.head_dim, dtype=torch.bfloat16)]
    integers = torch.zeros(R, dtype=torch.int64)
    logits = run(integers, integers, integers, SimpleNamespace(stacked={"keys": cache, "values": cache}))
    numbers, limits = torch.empty(65, 4, dtype=torch.float64), torch.empty(65, 2, dtype=torch.int32)
    seen, last = torch.empty(65, V, dtype=torch.int8), torch.empty(65, dtype=torch.int64)
    sample(logits, integers, integers.double(), SlotState(numbers, limits, seen, last, last))

for R in (1, 64):
    step(R, 768, 12, 2048, 512, tie_embeddings=True)
    step(R, 2048, 16, 5504, 2048)
step(1, 1024, 16, 3072, 1024, num_kv_heads=8, head_dim=256, qk_norm=True)
step(1, 768, 12, 3072, 1024, norm="layer", norm_bias=True, position="learned", attn_bias=True, ffn_bias=True, ffn="gelu")

def spread(layout):  # over elements of a row per thread, threads of a warp, and warps
    return re.findall(r"= \[\d+, (\d+)\]", layout) if "blocked" in layout else layout

TILE = ("ROWS", "COLUMNS", "DEPTH", "num_warps", "num_stages")
for (name, *options), kernel in compiled.items():
    options, ir = dict(options), kernel.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ir, re.M))
    sums = re.findall(r"axis = 1 : i32.*?\}\) : \(tensor<\d+x\d+xf32, (#\w+)>\)", ir, re.S)
    matmuls = sorted(set(re.findall(r"versionMajor = (\d)", ir)))
    variant = [name, *sorted(str(item) for item in options.items() if item[0] not in TILE)]
    assert kernel.metadata.shared <= 227 * 1024, (variant, kernel.metadata.shared)
    print(json.dumps([variant, options.get("ROWS"), matmuls, [spread(layouts[layout]) for layout in sums]]))
"""
OF_GENERATION = {"_embed", "_qkv", "_decode_attention", "_combine", "_up", "_linear", "_norm_forward", "_penalty", "_draw"}


def output_of(program: str, cache: Path) -> str:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    found = subprocess.run(
        [sys.executable, "-c", HOPPER + program], env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


def test_for_hopper(tmp_path: Path):
    assert set(output_of(PROGRAM, tmp_path).split()) == KERNELS


def test_a_row_is_summed_in_one_order(tmp_path: Path):
    """Programs of 16 and of 32 rows have the same matmul instructions, and no other sums."""
    orders: dict[str, dict[int, Any]] = defaultdict(dict)
    names = set()
    for line in output_of(GENERATION, tmp_path).splitlines():
        variant, rows, matmuls, sums = json.loads(line)
        names.add(variant[0].removesuffix("_kernel"))
        assert matmuls in ([], ["2"])  # 3 is wgmma
        assert orders[str(variant)].setdefault(rows, sums) == sums
    assert names == OF_GENERATION
    in_both = [(of[16], of[32]) for of in orders.values() if 32 in of]
    assert len(in_both) == 4
    assert not any(sums for pair in in_both for sums in pair)
