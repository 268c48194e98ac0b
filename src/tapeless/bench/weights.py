"""The same initial weights for every contender, so that their first losses can be compared.

Tensors are made one at a time: two whole models at once would stand in the memory that is measured."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from tapeless.config import AnyModelConfig, SimpleLMConfig
from tapeless.model.init import initial_values
from tapeless.model.simple_lm import SimpleLM
from tapeless.model.transformer import transformer_specs
from tapeless.ops.ffn_gate import GATED


def initial(config: AnyModelConfig, seed: int) -> dict[str, Callable[[], Tensor]]:
    """Our name -> a function that makes the tensor our model begins with."""
    if isinstance(config, SimpleLMConfig):
        params = SimpleLM(config, seed=seed).params
        return {name: w.clone for name, w in params.items()}

    def maker(spec):  # type: ignore[no-untyped-def]
        return lambda: initial_values(spec, config.init, config.num_layers, seed)

    return {spec.name: maker(spec) for spec in transformer_specs(config)}


def peer_names(config: AnyModelConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The peer's parameters, each with those of ours that it holds one below the other."""
    if isinstance(config, SimpleLMConfig):
        for name in ("embed.weight", "norm.weight", "norm.bias", "hidden.weight", "hidden.bias", "head.weight"):
            module, kind = name.split(".")
            yield name, (f"{module}.{kind[0]}",)
        return
    up = ("gate", "up") if config.ffn in GATED else ("up",)
    norm = ["weight", "bias"] if config.norm_bias else ["weight"]
    attn = ["weight", "bias"] if config.attn_bias else ["weight"]
    ffn = ["weight", "bias"] if config.ffn_bias else ["weight"]
    yield "embed.weight", ("embed.w",)
    if config.position == "learned":
        yield "pos.weight", ("pos.w",)
    for i in range(config.num_layers):
        block = f"blocks.{i}"
        for kind in norm:
            yield f"{block}.attn_norm.{kind}", (f"{block}.attn_norm.{kind[0]}",)
            yield f"{block}.ffn_norm.{kind}", (f"{block}.ffn_norm.{kind[0]}",)
        for kind in attn:
            yield f"{block}.attn.qkv.{kind}", tuple(f"{block}.attn.{kind[0]}{x}" for x in "qkv")
            yield f"{block}.attn.out.{kind}", (f"{block}.attn.{kind[0]}o",)
        for kind in ffn:
            yield f"{block}.ffn.up.{kind}", tuple(f"{block}.ffn.{kind[0]}_{x}" for x in up)
            yield f"{block}.ffn.down.{kind}", (f"{block}.ffn.{kind[0]}_down",)
        if config.qk_norm:
            yield from ((f"{block}.attn.{x}_norm.weight", (f"{block}.attn.{x}_norm.w",)) for x in "qk")
    for kind in norm:
        yield f"final_norm.{kind}", (f"final_norm.{kind[0]}",)
    if not config.tie_embeddings:
        yield "head.weight", ("head.w",)


@torch.no_grad()
def fill(peer: nn.Module, config: AnyModelConfig, seed: int) -> None:
    """Give the peer our initial weights, all of them."""
    values, held = initial(config, seed), dict(peer_names(config))
    assert held.keys() == dict(peer.named_parameters()).keys(), "the peer's parameters are not the ones that ours fill"
    for name, ours in held.items():
        peer.get_parameter(name).copy_(torch.cat([values[part]() for part in ours]))
