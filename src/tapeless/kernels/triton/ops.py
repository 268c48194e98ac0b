"""The set of ops for GPUs that Triton compiles for."""

from dataclasses import replace
from types import MappingProxyType

from tapeless.kernels.triton.add_norm import add_norm
from tapeless.kernels.triton.decode import decoder
from tapeless.kernels.triton.embed import embed
from tapeless.kernels.triton.ffn_down import ffn_down
from tapeless.kernels.triton.fp8_ffn_down import fp8_ffn_down
from tapeless.kernels.triton.fp8_linear import fp8_linear
from tapeless.kernels.triton.fp8_qkv_rope import fp8_qkv_rope
from tapeless.kernels.triton.graph import capture_graph
from tapeless.kernels.triton.library_attention import attention
from tapeless.kernels.triton.linear import linear
from tapeless.kernels.triton.linear_cross_entropy import linear_cross_entropy
from tapeless.kernels.triton.qkv_rope import qkv_rope
from tapeless.kernels.triton.sample import sample
from tapeless.kernels.triton.update import adam_update, grad_norm
from tapeless.ops.add_norm import norm_of
from tapeless.ops.dropout import DROPOUT
from tapeless.ops.op import OpSet


def triton_ops() -> OpSet:
    norms = {"rms": add_norm(False), "layer": add_norm(True)}
    ops = OpSet(
        name="triton",
        embed=embed(),
        norm=MappingProxyType({kind: norm_of(op) for kind, op in norms.items()}),
        add_norm=MappingProxyType(norms),
        qkv_rope=qkv_rope(),
        attention=attention(),
        linear=linear(),
        ffn_down=MappingProxyType(ffn_down()),
        linear_cross_entropy=linear_cross_entropy(),
        dropout=DROPOUT,
        decoder=decoder,
        sampler=sample,
        adam_update=adam_update,
        grad_norm=grad_norm,
        capture=capture_graph,
    )
    return replace(
        ops,
        non_accumulating=replace(
            ops,
            linear=linear(overwrite=True),
            ffn_down=MappingProxyType(ffn_down(overwrite=True)),
            linear_cross_entropy=linear_cross_entropy(overwrite=True),
        ),
    )


def fp8_ops() -> OpSet:
    """The four matrices of every block in fp8. The head stays in bfloat16: its logits are sensitive to rounding."""
    ops, qkv_rope = triton_ops(), fp8_qkv_rope()
    assert ops.non_accumulating is not None
    return replace(
        ops,
        name="triton-fp8",
        qkv_rope=qkv_rope,
        linear=fp8_linear(),
        ffn_down=MappingProxyType(fp8_ffn_down()),
        non_accumulating=replace(
            ops.non_accumulating,
            name="triton-fp8",
            qkv_rope=qkv_rope,
            linear=fp8_linear(overwrite=True),
            ffn_down=MappingProxyType(fp8_ffn_down(overwrite=True)),
        ),
    )
