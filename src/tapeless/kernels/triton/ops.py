"""The set of ops for GPUs that Triton compiles for."""

from types import MappingProxyType

from tapeless.kernels.triton.add_norm import add_norm, norm
from tapeless.kernels.triton.embed import EMBED
from tapeless.kernels.triton.ffn_down import ffn_down
from tapeless.kernels.triton.library_attention import attention
from tapeless.kernels.triton.linear import LINEAR
from tapeless.kernels.triton.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from tapeless.kernels.triton.qkv_rope import qkv_rope
from tapeless.kernels.triton.update import adam_update, grad_norm
from tapeless.ops.dropout import DROPOUT
from tapeless.ops.op import OpSet


def triton_ops() -> OpSet:
    return OpSet(
        name="triton",
        embed=EMBED,
        norm=MappingProxyType({"rms": norm(False), "layer": norm(True)}),
        add_norm=MappingProxyType({"rms": add_norm(False), "layer": add_norm(True)}),
        qkv_rope=qkv_rope(),
        attention=attention(),
        linear=LINEAR,
        ffn_down=MappingProxyType(ffn_down()),
        linear_cross_entropy=LINEAR_CROSS_ENTROPY,
        dropout=DROPOUT,
        adam_update=adam_update,
        grad_norm=grad_norm,
        capturable=True,
    )
