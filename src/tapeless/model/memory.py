"""What a forward keeps for its backward, in bytes by name, known before it runs.

block.py and sublayers.py say which policy keeps what. Inputs (tokens, targets, documents) are the caller's and do not
count.
Tested by: tests/model/test_recompute.py."""

from tapeless.config import ModelConfig, nearest
from tapeless.errors import ConfigError
from tapeless.model.params import DTYPES
from tapeless.model.sublayers import RECOMPUTE
from tapeless.ops.ffn_gate import GATED


def saved_bytes(config: ModelConfig, batch_size: int, seq_len: int, recompute: str, dtype: str) -> dict[str, int]:
    """Name -> bytes, for model.forward on (batch_size, seq_len) tokens with the reference ops."""
    if recompute not in RECOMPUTE:
        raise ConfigError(f"unknown recompute policy {recompute!r}; {nearest(recompute, RECOMPUTE)}")
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; {nearest(dtype, DTYPES)}")
    c, N = config, batch_size * seq_len
    H, G, D = c.num_heads, c.num_kv_heads, c.head_dim
    compute = DTYPES[dtype][1].itemsize
    stat = max(compute, 4)  # norm statistics and log-sum-exps are never narrower than float32

    stream = N * c.hidden_dim * compute  # one residual stream, or one norm's output
    stats = N * stat * (2 if c.norm == "layer" else 1)
    qkv = N * (H + 2 * G) * D * compute
    gate_up = N * c.intermediate_dim * (2 if c.ffn in GATED else 1) * compute

    attn = {"o": N * H * D * compute, "lse": N * H * stat}
    if recompute == "cheap" and c.qk_norm:
        attn["qkv"] = qkv
    else:
        attn |= {"q": N * H * D * compute, "k": N * G * D * compute, "v": N * G * D * compute}
        if c.qk_norm:
            attn |= {"qkv": qkv, "qk_norm.r": N * (H + G) * stat}

    if recompute == "full":
        block = {"x": stream}
    elif c.norm_placement == "pre":
        block = {"attn_norm.s": stream, "attn_norm.stats": stats, "ffn_norm.s": stream, "ffn_norm.stats": stats}
        if recompute == "none":
            block |= {"attn_norm.n": stream, "ffn_norm.n": stream}
    else:
        block = {"x": stream, "attn_norm.s": stream, "attn_norm.stats": stats, "ffn_norm.s": stream, "ffn_norm.stats": stats}
        if recompute == "none":
            block |= {"attn_norm.n": stream}
    if recompute != "full":
        block |= {f"attn.{name}": size for name, size in attn.items()}
        block["ffn.gate_up"] = gate_up

    table = {f"blocks.{i}.{name}": size for i in range(c.num_layers) for name, size in block.items()}
    return table | {"final_norm.s": stream, "final_norm.stats": stats, "head.x": stream, "head.lse": N * stat}
