"""The autograd twin: the whole model once more, as a plain PyTorch user would write it, for torch's tape to differentiate.

Nothing here is shared with `ops/` or `model/` but the hash that decides dropout masks, so a mistake would have to be made
twice, in two styles, to go unseen. Parameters come as a dict by name, in float64; the result is the loss."""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from tapeless.config import AnyModelConfig, Lora, ModelConfig, SimpleLMConfig
from tapeless.ops.dropout import dropout_key, dropout_scale

Point = Mapping[str, Tensor]


def loss(
    config: AnyModelConfig,
    params: Point,
    tokens: Tensor,  # (B, T) int64
    targets: Tensor,  # (B, T) int64; -100 is ignored
    *,
    documents: Tensor | None = None,  # (B, T) int64
    masks: Point | None = None,  # dropout_masks
    lora: Lora | None = None,
) -> Tensor:  # ()
    if isinstance(config, SimpleLMConfig):
        return F.cross_entropy(simple_lm_logits(config, params, tokens).flatten(0, 1), targets.flatten())
    if lora is not None:
        params = adapted(params, lora)
    z = transformer_logits(config, params, tokens, documents=documents, masks=masks).flatten(0, 1)  # (N, V)
    result = F.cross_entropy(z, targets.flatten(), label_smoothing=config.label_smoothing)
    return result + config.z_loss * z.logsumexp(-1)[targets.flatten() != -100].square().mean()


def adapted(params: Point, lora: Lora) -> dict[str, Tensor]:
    """Every matrix with its adapter multiplied out and added to it, for a model that knows of none."""
    pairs = {name: (params.get(f"{name}.lora_a"), params.get(f"{name}.lora_b")) for name in params}
    return {
        name: w if a is None or b is None else w + lora.alpha / lora.rank * torch.einsum("or,ri->oi", b, a)
        for (name, w), (a, b) in zip(params.items(), pairs.values(), strict=True)
    }


def dropout_masks(
    config: ModelConfig,
    tokens: Tensor,  # (B, T)
    *,
    seed: int,
    step: int,
    first_sample: int,
) -> dict[str, Tensor]:
    """What each place of the model is multiplied with: 0 or 1 / (1 - p), (B, T, C). The only thing taken from `ops`."""
    places = ["embed", *(f"blocks.{i}.{half}" for i in range(config.num_layers) for half in ("attn", "ffn"))]
    blank = torch.ones(*tokens.shape, config.hidden_dim, dtype=torch.float64)
    return {place: dropout_scale(blank, config.dropout, dropout_key(seed, step, place), first_sample) for place in places}


def transformer_logits(
    c: ModelConfig,
    params: Point,
    tokens: Tensor,  # (B, T) int64
    *,
    documents: Tensor | None = None,  # (B, T) int64
    masks: Point | None = None,
) -> Tensor:  # (B, T, V)
    def dropped(x: Tensor, place: str) -> Tensor:
        return x if masks is None else x * masks[place]

    def norm(x: Tensor, name: str) -> Tensor:
        if c.norm == "rms":
            return F.rms_norm(x, x.shape[-1:], params[f"{name}.w"], c.norm_eps)
        return F.layer_norm(x, x.shape[-1:], params[f"{name}.w"], params.get(f"{name}.b"), c.norm_eps)

    def attention(x: Tensor, i: int) -> Tensor:
        return dropped(self_attention(c, params, f"blocks.{i}.attn", x, documents), f"blocks.{i}.attn")

    def ffn(x: Tensor, i: int) -> Tensor:
        return dropped(feed_forward(c, params, f"blocks.{i}.ffn", x), f"blocks.{i}.ffn")

    x = F.embedding(tokens, params["embed.w"])
    if c.position == "learned":
        x = x + params["pos.w"][: tokens.shape[1]]
    x = dropped(x, "embed")
    for i in range(c.num_layers):
        if c.norm_placement == "pre":
            x = x + attention(norm(x, f"blocks.{i}.attn_norm"), i)
            x = x + ffn(norm(x, f"blocks.{i}.ffn_norm"), i)
        else:
            x = norm(x + attention(x, i), f"blocks.{i}.attn_norm")
            x = norm(x + ffn(x, i), f"blocks.{i}.ffn_norm")
    logits = F.linear(norm(x, "final_norm"), params["embed.w" if c.tie_embeddings else "head.w"])
    return c.logit_softcap * torch.tanh(logits / c.logit_softcap) if c.logit_softcap else logits


def self_attention(
    c: ModelConfig,
    params: Point,
    name: str,
    x: Tensor,  # (B, T, C)
    documents: Tensor | None,  # (B, T) int64
) -> Tensor:  # (B, T, C)
    def heads(kind: str) -> Tensor:  # (B, T, heads, D)
        return F.linear(x, params[f"{name}.w{kind}"], params.get(f"{name}.b{kind}")).unflatten(-1, (-1, c.head_dim))

    q, k, v = heads("q"), heads("k"), heads("v")
    if c.qk_norm:
        q = F.rms_norm(q, q.shape[-1:], params[f"{name}.q_norm.w"], c.norm_eps)
        k = F.rms_norm(k, k.shape[-1:], params[f"{name}.k_norm.w"], c.norm_eps)
    if c.position == "rope":
        q, k = rotated(q, c.rope_theta), rotated(k, c.rope_theta)
    k, v = (y.repeat_interleave(c.num_heads // c.num_kv_heads, dim=2) for y in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(c.head_dim)
    t = torch.arange(x.shape[1])
    visible = (t[:, None] >= t[None, :]).expand(x.shape[0], -1, -1)  # (B, T, S)
    if documents is not None:
        visible = visible & (documents[:, :, None] == documents[:, None, :])
    weights = scores.where(visible[:, None], -torch.inf).softmax(-1)
    o = torch.einsum("bhts,bshd->bthd", weights, v).flatten(2)
    return F.linear(o, params[f"{name}.wo"], params.get(f"{name}.bo"))


def rotated(x: Tensor, theta: float) -> Tensor:  # (B, T, heads, D)
    """Features i and i + D/2 as the real and imaginary part of one number, turned by multiplication."""
    T, D = x.shape[1], x.shape[3]
    angle = torch.outer(torch.arange(T).double(), theta ** (-torch.arange(D // 2).double() * 2 / D))
    turned = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


def feed_forward(c: ModelConfig, params: Point, name: str, x: Tensor) -> Tensor:  # (B, T, C)
    def linear(kind: str, y: Tensor) -> Tensor:
        return F.linear(y, params[f"{name}.w_{kind}"], params.get(f"{name}.b_{kind}"))

    up = linear("up", x)
    match c.ffn:
        case "swiglu":
            h = F.silu(linear("gate", x)) * up
        case "geglu":
            h = F.gelu(linear("gate", x), approximate="tanh") * up
        case "gelu":
            h = F.gelu(up, approximate="tanh")
        case "tanh":
            h = up.tanh()
        case "relu":
            h = F.relu(up)
        case "relu2":
            h = F.relu(up).square()
        case other:
            raise ValueError(f"the twin knows no feed-forward layer {other!r}")
    return linear("down", h)


def simple_lm_logits(c: SimpleLMConfig, params: Point, tokens: Tensor) -> Tensor:  # (B, T, V)
    x = F.layer_norm(F.embedding(tokens, params["embed.w"]), (c.hidden_dim,), params["norm.w"], params["norm.b"], c.norm_eps)
    h = F.gelu(F.linear(x, params["hidden.w"], params["hidden.b"]), approximate="tanh")
    return F.linear(h, params["head.w"])
