"""What every layer does in a step: the norm of its gradient, and how far the update moves its weights.

    grad_norm     |g| of a group, before clipping; the squares of all groups add up to the square of the global norm
    update_ratio  |p_after - p_before| / |p_before|, of the weights as they are stored: whatever the optimizer
A group is a sublayer with its norm (blocks.3.attn, blocks.3.ffn), or what else has a name of its own (embed, head …). It is a
look at some steps only: at the first, the second, the fourth … and then at every n-th, a function of the step alone, so that a
resumed run looks where the unbroken one did. The weights are read before and after such a step and never written. Of a
matrix beyond SAMPLED elements every k-th stands for all, so that a look takes no memory worth speaking of. They come from
every row and from every column: rows of an embedding are tokens, of which a step sees few, and columns are channels, of which
some are much louder than others.
Tested by: tests/train/test_layer_stats.py."""

import math
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.model.build import AnyModel
from tapeless.optim.clip import grad_norm
from tapeless.train.memory import device_bytes, resident_bytes

SAMPLED = 2**16  # elements


class Part(NamedTuple):
    """Of one parameter what is compared before and after."""

    w: Tensor  # of any shape, a view
    weight: float  # how many elements each of them stands for


def group_of(name: str) -> str:
    """blocks.3.attn_norm.w -> blocks.3.attn; embed.w -> embed."""
    top = name.split(".")
    return f"blocks.{top[1]}.{top[2].removesuffix('_norm')}" if top[0] == "blocks" else top[0]


def part_of(w: Tensor) -> Part:
    if w.numel() <= SAMPLED:
        return Part(w, 1.0)
    enough = count(-(-w.numel() // SAMPLED))
    every = next(k for k in enough if math.gcd(k, w.shape[-1]) == 1)  # else only some columns would ever be met
    some = w.view(-1)[::every]
    return Part(some, w.numel() / some.numel())


class LayerStats:
    def __init__(self, model: AnyModel, every: int):
        """every: steps between looks; 0: none."""
        self.model, self.every = model, every
        spans = model.store.trained.spans
        self._names: dict[str, list[str]] = {}  # of each group; they are neighbours in the flat buffer
        for name in spans:
            self._names.setdefault(group_of(name), []).append(name)
        self._stretches = {group: slice(spans[names[0]][0], sum(spans[names[-1]])) for group, names in self._names.items()}
        self._before: dict[str, list[tuple[Part, Tensor]]] = {}

    def due(self, step: int) -> bool:
        """step: counted from 1."""
        early = step < self.every and step & (step - 1) == 0
        return self.every > 0 and (early or step % self.every == 0)

    def before(self) -> None:
        """Remember the weights that the step will change."""
        params = self.model.params
        parts = {group: [part_of(params[name]) for name in names] for group, names in self._names.items()}
        self._before = {group: [(part, part.w.clone()) for part in of] for group, of in parts.items()}

    def after(self, norm: float) -> dict[str, Any]:
        """What the step did. norm: its global gradient norm before clipping. Clipping may have shortened the gradients where
        they lie, all by one factor, which the global norm undoes."""
        grads = self.model.store.flat_grads
        norms = torch.stack([grad_norm(grads[stretch]) for stretch in self._stretches.values()]).double()  # (groups,)
        moved, size = (torch.stack(x) for x in zip(*map(_squares, self._before.values()), strict=True))  # (groups,)
        self._before = {}
        total = torch.linalg.vector_norm(norms)
        norms = norms * torch.where(total > 0, norm / total, 0.0)
        found = torch.stack([norms, (moved / size).sqrt()]).tolist()  # the one wait for the device
        return {
            "grad_norm": dict(zip(self._stretches, found[0], strict=True)),
            "update_ratio": dict(zip(self._stretches, found[1], strict=True)),
            "memory_bytes": resident_bytes(),
            "device_memory_bytes": device_bytes(self.model.device),
        }


def _squares(parts: list[tuple[Part, Tensor]]) -> tuple[Tensor, Tensor]:  # (), () float64
    """|p_after - p_before|^2 and |p_before|^2 of a group."""
    moved = [torch.linalg.vector_norm(part.w - old).double().square() * part.weight for part, old in parts]
    size = [torch.linalg.vector_norm(old).double().square() * part.weight for part, old in parts]
    return torch.stack(moved).sum(), torch.stack(size).sum()
