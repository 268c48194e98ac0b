"""The set of ops for CPUs, bound to one workspace."""

from dataclasses import replace
from types import MappingProxyType

from tapeless.kernels.cpu.add_norm import add_norm
from tapeless.kernels.cpu.attention import attention
from tapeless.kernels.cpu.capture import capture_with
from tapeless.kernels.cpu.decode import decoder
from tapeless.kernels.cpu.embed import embed
from tapeless.kernels.cpu.ffn_down import ffn_down
from tapeless.kernels.cpu.jit import use_torchs_threads
from tapeless.kernels.cpu.linear import linear
from tapeless.kernels.cpu.linear_cross_entropy import linear_cross_entropy
from tapeless.kernels.cpu.qkv_rope import qkv_rope
from tapeless.kernels.cpu.update import adam_update, grad_norm
from tapeless.kernels.workspace import Workspace
from tapeless.ops.add_norm import norm_of
from tapeless.ops.dropout import DROPOUT
from tapeless.ops.op import OpSet


def cpu_ops(ws: Workspace | None = None) -> OpSet:
    use_torchs_threads()
    ws = ws or Workspace()
    norms = {"rms": add_norm(False, ws), "layer": add_norm(True, ws)}
    ops = OpSet(
        name="cpu",
        embed=embed(ws),
        norm=MappingProxyType({kind: norm_of(op) for kind, op in norms.items()}),
        add_norm=MappingProxyType(norms),
        qkv_rope=qkv_rope(ws),
        attention=attention(ws),
        linear=linear(ws),
        ffn_down=MappingProxyType(ffn_down(ws)),
        linear_cross_entropy=linear_cross_entropy(ws),
        dropout=DROPOUT,
        begin=use_torchs_threads,
        decoder=decoder,
        adam_update=adam_update,
        grad_norm=grad_norm,
        capture=capture_with(ws),
    )
    return replace(
        ops,
        non_accumulating=replace(
            ops,
            linear=linear(ws, overwrite=True),
            ffn_down=MappingProxyType(ffn_down(ws, overwrite=True)),
            linear_cross_entropy=linear_cross_entropy(ws, overwrite=True),
        ),
    )
