"""The autograd reference: the whole model written in plain PyTorch, differentiated by autograd.

It shares with `ops/` and `model/` only the list of sublayers and the hash that decides dropout masks, so a mistake goes unseen
only if it was made twice, in two styles. Parameters come as a dict by name, in float64; the result is the loss. Attention and
feed-forward have formulas of their own here; other kinds of sublayers: `sublayer_output`."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tapeless.config import AnyModelConfig, Lora, ModelConfig, SimpleLMConfig
from tapeless.model.block import build_blocks
from tapeless.model.linear import LinearParams
from tapeless.model.sublayer import Context, Sublayer, Views
from tapeless.ops.dropout import dropout_key, dropout_scale
from tapeless.ops.reference import REFERENCE

Point = Mapping[str, Tensor]
Formula = Callable[[ModelConfig, Point, Tensor, Tensor | None], Tensor]  # parameters by short names, x, documents -> y
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # by ModelConfig.ffn; the first two of the gate
    "swiglu": F.silu,
    "geglu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def reference_loss(
    config: AnyModelConfig,
    params: Point,
    tokens: Tensor,  # (B, T) int64
    targets: Tensor,  # (B, T) int64; -100 is ignored
    documents: Tensor | None = None,  # (B, T) int64
    *,
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
    with_adapter = [name for name in params if f"{name}.lora_a" in params]
    deltas = {name: torch.einsum("or,ri->oi", params[f"{name}.lora_b"], params[f"{name}.lora_a"]) for name in with_adapter}
    return {**params, **{name: params[name] + lora.alpha / lora.rank * delta for name, delta in deltas.items()}}


def sublayers(config: ModelConfig) -> list[Sublayer]:
    return [sublayer for block in build_blocks(config) for sublayer in block.sublayers]


def dropout_masks(
    config: ModelConfig,
    tokens: Tensor,  # (B, T)
    *,
    seed: int,
    step: int,
    first_sample: int,
) -> dict[str, Tensor]:
    """What the output of each sublayer, and the embedding, is multiplied with: 0 or 1 / (1 - p), (B, T, C)."""
    blank = torch.ones(*tokens.shape, config.hidden_dim, dtype=torch.float64)
    return {
        place: dropout_scale(blank, config.dropout, dropout_key(seed, step, place), first_sample)
        for place in ("embed", *(sublayer.name for sublayer in sublayers(config)))
    }


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

    def output(sublayer: Sublayer, x: Tensor) -> Tensor:
        prefix = f"{sublayer.name}."
        own = {key.removeprefix(prefix): w for key, w in params.items() if key.startswith(prefix)}
        return dropped(sublayer_output(sublayer, own, x, documents), sublayer.name)

    x = F.embedding(tokens, params["embed.w"])
    if c.position == "learned":
        x = x + params["pos.w"][: tokens.shape[1]]
    x = dropped(x, "embed")
    for sublayer in sublayers(c):
        if c.norm_placement == "pre":
            x = x + output(sublayer, norm(x, f"{sublayer.name}_norm"))
        else:
            x = norm(x + output(sublayer, x), f"{sublayer.name}_norm")
    logits = F.linear(norm(x, "final_norm"), params["embed.w" if c.tie_embeddings else "head.w"])
    return c.logit_softcap * torch.tanh(logits / c.logit_softcap) if c.logit_softcap else logits


def sublayer_output(
    sublayer: Sublayer,
    p: Point,  # its parameters by their short names: wq, w_up
    x: Tensor,  # (B, T, C)
    documents: Tensor | None,  # (B, T) int64
) -> Tensor:  # (B, T, C)
    """By the formula of its kind here; else by its method `reference`, if it has one; else by its own forward with the
    reference ops, which then only its backward is checked against."""
    if sublayer.kind in FORMULAS:
        return FORMULAS[sublayer.kind](sublayer.config, p, x, documents)
    reference = getattr(sublayer, "reference", None)
    if reference is not None:
        return reference(x, p, documents)
    return sublayer.forward(x, sublayer.views(_NamedViews(p)), Context(REFERENCE, "none", documents))[0]


class _NamedViews(Views):
    """Parameters that are not in one buffer, so that autograd can follow each."""

    def __init__(self, params: Point):
        self.params = params

    def __getitem__(self, name: str) -> Tensor | None:
        return self.params.get(name)

    def linear(self, weights: Sequence[str], biases: Sequence[str] = ()) -> LinearParams:
        w, b = ([self.params[name] for name in names if name in self.params] for names in (weights, biases))
        return LinearParams(torch.cat(w), torch.cat(b) if b else None)


def self_attention(c: ModelConfig, p: Point, x: Tensor, documents: Tensor | None) -> Tensor:
    def heads(kind: str) -> Tensor:  # (B, T, heads, D)
        return F.linear(x, p[f"w{kind}"], p.get(f"b{kind}")).unflatten(-1, (-1, c.head_dim))

    q, k, v = heads("q"), heads("k"), heads("v")
    if c.qk_norm:
        q = F.rms_norm(q, q.shape[-1:], p["q_norm.w"], c.norm_eps)
        k = F.rms_norm(k, k.shape[-1:], p["k_norm.w"], c.norm_eps)
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
    return F.linear(o, p["wo"], p.get("bo"))


def rotated(x: Tensor, theta: float) -> Tensor:  # (B, T, heads, D)
    """Features i and i + D/2 as the real and imaginary part of one number, turned by multiplication."""
    T, D = x.shape[1], x.shape[3]
    angle = torch.outer(torch.arange(T).double(), theta ** (-torch.arange(D // 2).double() * 2 / D))
    turned = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


def feed_forward(c: ModelConfig, p: Point, x: Tensor, documents: Tensor | None) -> Tensor:
    def linear(kind: str, y: Tensor) -> Tensor:
        return F.linear(y, p[f"w_{kind}"], p.get(f"b_{kind}"))

    activation, up = ACTIVATIONS[c.ffn], linear("up", x)
    return linear("down", activation(linear("gate", x)) * up if "w_gate" in p else activation(up))


FORMULAS: dict[str, Formula] = {"attn": self_attention, "ffn": feed_forward}


def simple_lm_logits(c: SimpleLMConfig, params: Point, tokens: Tensor) -> Tensor:  # (B, T, V)
    x = F.layer_norm(F.embedding(tokens, params["embed.w"]), (c.hidden_dim,), params["norm.w"], params["norm.b"], c.norm_eps)
    h = F.gelu(F.linear(x, params["hidden.w"], params["hidden.b"]), approximate="tanh")
    return F.linear(h, params["head.w"])
