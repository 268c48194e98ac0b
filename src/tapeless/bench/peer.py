"""The peer: the same model as a careful PyTorch user would write it, for autograd and torch.compile.

Fused matmuls for q, k, v and for gate and up, the library's norms, attention and cross-entropy, rotary tables made once.
Matmuls and attention run in bfloat16 under autocast; what should not, such as the rotation, is computed in float32.
Tested by: tests/bench/test_peer.py."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapeless.config import AnyModelConfig, ModelConfig, SimpleLMConfig
from tapeless.ops.ffn_gate import GATED
from tapeless.verify.autograd_reference import ACTIVATIONS


def norm(c: ModelConfig) -> nn.Module:
    if c.norm == "rms":
        return nn.RMSNorm(c.hidden_dim, eps=c.norm_eps)
    return nn.LayerNorm(c.hidden_dim, eps=c.norm_eps, bias=c.norm_bias)


def rotated(
    x: Tensor,  # (B, heads, T, D)
    cos: Tensor,  # (T, D/2)
    sin: Tensor,  # (T, D/2)
) -> Tensor:  # (B, heads, T, D)
    lo, hi = x.chunk(2, -1)
    return torch.cat([lo * cos - hi * sin, hi * cos + lo * sin], -1).type_as(x)


class Attention(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.heads = [c.num_heads, c.num_kv_heads, c.num_kv_heads]
        self.qkv = nn.Linear(c.hidden_dim, sum(self.heads) * c.head_dim, bias=c.attn_bias)
        self.q_norm = nn.RMSNorm(c.head_dim, eps=c.norm_eps) if c.qk_norm else None
        self.k_norm = nn.RMSNorm(c.head_dim, eps=c.norm_eps) if c.qk_norm else None
        self.out = nn.Linear(c.num_heads * c.head_dim, c.hidden_dim, bias=c.attn_bias)

    def forward(
        self,
        x: Tensor,  # (B, T, C)
        rope: tuple[Tensor, Tensor] | None,  # (T, D/2) each
    ) -> Tensor:  # (B, T, C)
        B, T, _ = x.shape
        q, k, v = self.qkv(x).view(B, T, sum(self.heads), -1).transpose(1, 2).split(self.heads, 1)  # (B, heads, T, D)
        if self.q_norm is not None and self.k_norm is not None:
            wide = self.q_norm.weight.dtype  # the library has no fast norm of bfloat16 by float32
            q, k = self.q_norm(q.to(wide)).type_as(v), self.k_norm(k.to(wide)).type_as(v)
        if rope is not None:
            q, k = rotated(q, *rope), rotated(k, *rope)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads[0] != self.heads[1])
        return self.out(o.transpose(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.gated, self.activation = c.ffn in GATED, ACTIVATIONS[c.ffn]
        self.up = nn.Linear(c.hidden_dim, c.intermediate_dim * (2 if self.gated else 1), bias=c.ffn_bias)
        self.down = nn.Linear(c.intermediate_dim, c.hidden_dim, bias=c.ffn_bias)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        if not self.gated:
            return self.down(self.activation(self.up(x)))
        gate, up = self.up(x).chunk(2, -1)  # (B, T, F)
        return self.down(self.activation(gate) * up)


class Block(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.pre = c.norm_placement == "pre"
        self.attn_norm, self.attn = norm(c), Attention(c)
        self.ffn_norm, self.ffn = norm(c), FeedForward(c)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:  # (B, T, C)
        if self.pre:
            x = x + self.attn(self.attn_norm(x), rope)
            return x + self.ffn(self.ffn_norm(x))
        x = self.attn_norm(x + self.attn(x, rope))
        return self.ffn_norm(x + self.ffn(x))


class Peer(nn.Module):
    """tokens, targets -> loss."""

    cos: Tensor  # (Tmax, D/2)
    sin: Tensor  # (Tmax, D/2)

    def __init__(self, c: ModelConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = c
        self.embed = nn.Embedding(c.vocab_size, c.hidden_dim)
        self.pos = nn.Embedding(c.max_seq_len, c.hidden_dim) if c.position == "learned" else None
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.final_norm = norm(c)
        self.head = nn.Linear(c.hidden_dim, c.vocab_size, bias=False)
        if c.tie_embeddings:
            self.head.weight = self.embed.weight
        self.to(dtype)
        i = torch.arange(0, c.head_dim, 2, dtype=torch.float64)
        angle = torch.outer(torch.arange(c.max_seq_len, dtype=torch.float64), c.rope_theta ** (-i / c.head_dim))
        self.register_buffer("cos", angle.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angle.sin().to(dtype), persistent=False)

    def forward(
        self,
        tokens: Tensor,  # (B, T) int64
        targets: Tensor,  # (B, T) int64
    ) -> Tensor:  # ()
        T = tokens.shape[1]
        x = self.embed(tokens)  # (B, T, C)
        if self.pos is not None:
            x = x + self.pos.weight[:T]
        rope = (self.cos[:T], self.sin[:T]) if self.config.position == "rope" else None
        for block in self.blocks:
            x = block(x, rope)
        return language_loss(self.head(self.final_norm(x)), targets, self.config)


class SimplePeer(nn.Module):
    """SimpleLM: tokens, targets -> loss."""

    def __init__(self, c: SimpleLMConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.hidden_dim)
        self.norm = nn.LayerNorm(c.hidden_dim, eps=c.norm_eps)
        self.hidden = nn.Linear(c.hidden_dim, c.intermediate_dim)
        self.head = nn.Linear(c.intermediate_dim, c.vocab_size, bias=False)
        self.to(dtype)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (B, T), (B, T) -> ()
        logits = self.head(F.gelu(self.hidden(self.norm(self.embed(tokens))), approximate="tanh"))  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def language_loss(
    logits: Tensor,  # (B, T, V)
    targets: Tensor,  # (B, T) int64
    c: ModelConfig,
) -> Tensor:  # ()
    z = logits.flatten(0, 1)  # (N, V)
    if z.dtype == torch.bfloat16 and (c.logit_softcap or c.z_loss):
        z = z.float()  # as cross_entropy does by itself
    if c.logit_softcap:
        z = c.logit_softcap * torch.tanh(z / c.logit_softcap)
    loss = F.cross_entropy(z, targets.flatten(), label_smoothing=c.label_smoothing)
    return loss + c.z_loss * z.logsumexp(-1).square().mean() if c.z_loss else loss


def build_peer(config: AnyModelConfig, dtype: torch.dtype = torch.float32) -> Peer | SimplePeer:
    return SimplePeer(config, dtype) if isinstance(config, SimpleLMConfig) else Peer(config, dtype)
