"""The same initial weights for every contender, so that their first losses can be compared.

Tensors are made one at a time: a second whole model would count in the memory that is measured."""

from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import Tensor, nn

from tapeless.config import AnyModelConfig, SimpleLMConfig
from tapeless.model.init import initial_values
from tapeless.model.simple_lm import SimpleLM
from tapeless.model.transformer import transformer_specs

# The peer's linear layers whose parameters have other names here: weight and bias of out are wo and bo, of up w_up and b_up,
# below w_gate and b_gate if the model has them.
PARTS = {"qkv": ("q", "k", "v"), "out": ("o",), "up": ("_gate", "_up"), "down": ("_down",)}


def initial(config: AnyModelConfig, seed: int) -> dict[str, Callable[[], Tensor]]:
    """Our name -> a function that makes the tensor's initial value."""
    if isinstance(config, SimpleLMConfig):
        return {name: w.clone for name, w in SimpleLM(config, seed=seed).params.items()}
    specs = transformer_specs(config)
    return {spec.name: partial(initial_values, spec, config.init, config.num_layers, seed) for spec in specs}


def peer_names(peer: nn.Module, ours: Collection[str]) -> dict[str, list[str]]:
    """The peer's parameters, each with those of ours that it holds one below the other: each of ours once."""
    held = {}
    for name, _ in peer.named_parameters():
        module, kind = name.rsplit(".", 1)
        parent, _, layer = module.rpartition(".")
        joined = [f"{parent}.{kind[0]}{part}" for part in PARTS.get(layer, ())]
        held[name] = [part for part in joined if part in ours] or [f"{module}.{kind[0]}"]
    assert sorted(part for parts in held.values() for part in parts) == sorted(ours), "the peer has other parameters than ours"
    return held


@torch.no_grad()
def fill(peer: nn.Module, config: AnyModelConfig, seed: int) -> None:
    """Give the peer our initial weights, all of them."""
    values = initial(config, seed)
    for name, parts in peer_names(peer, values).items():
        peer.get_parameter(name).copy_(torch.cat([values[part]() for part in parts]))
