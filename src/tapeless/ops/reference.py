"""The reference set: the ops of this folder, plain torch, any device and dtype. Every other set is tested
against it.
Tested by: tests/ops/test_reference.py."""

from types import MappingProxyType

from tapeless.ops.add_norm import ADD_LAYER_NORM, ADD_RMS_NORM
from tapeless.ops.attention import ATTENTION
from tapeless.ops.dropout import DROPOUT
from tapeless.ops.embed import EMBED
from tapeless.ops.ffn_down import FFN_DOWN
from tapeless.ops.layer_norm import LAYER_NORM
from tapeless.ops.linear import LINEAR
from tapeless.ops.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from tapeless.ops.op import OpSet
from tapeless.ops.qkv_rope import QKV_ROPE
from tapeless.ops.rms_norm import RMS_NORM

REFERENCE = OpSet(
    name="reference",
    embed=EMBED,
    norm=MappingProxyType({"rms": RMS_NORM, "layer": LAYER_NORM}),
    add_norm=MappingProxyType({"rms": ADD_RMS_NORM, "layer": ADD_LAYER_NORM}),
    qkv_rope=QKV_ROPE,
    attention=ATTENTION,
    linear=LINEAR,
    ffn_down=MappingProxyType(FFN_DOWN),
    linear_cross_entropy=LINEAR_CROSS_ENTROPY,
    dropout=DROPOUT,
)
