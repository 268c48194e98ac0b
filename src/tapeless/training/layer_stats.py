"""Statistics of every layer in a step: the norm of its gradient, and how far the update moves its weights.

    grad_norm     |g| of a group, before clipping; the squares of all groups add up to the square of the global norm
    update_ratio  |p_after - p_before| / |p_before|, of the weights as they are stored, for any optimizer
A group is a sublayer with its norm (blocks.3.attn, blocks.3.ffn), or another top-level name (embed, head …). Measured at steps
1, 2, 4 … and then at every n-th: a function of the step alone, so that a resumed run measures the same steps. The weights are
read before and after such a step and never written. Of a tensor with more than SAMPLED elements every k-th is read, which needs
little memory. They come from every row and every column: the rows of an embedding are tokens, of which a step sees few, and the
columns are channels, some of which are much larger than others. Norms are taken on the device in the tensors' own dtype and
combined in float64 on the CPU: not every device has float64.
Tested by: tests/train/test_layer_stats.py."""

import math
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.model.build import AnyModel
from tapeless.optim.clip import grad_norm
from tapeless.training.resources import device_bytes, resident_bytes

SAMPLED = 2**16  # elements


class Part(NamedTuple):
    """The elements of one parameter that are compared before and after a step."""

    w: Tensor  # of any shape, a view
    weight: float  # how many elements each of them represents


def group_of(name: str) -> str:
    """blocks.3.attn_norm.w -> blocks.3.attn; embed.w -> embed."""
    top = name.split(".")
    return f"blocks.{top[1]}.{top[2].removesuffix('_norm')}" if top[0] == "blocks" else top[0]


def part_of(w: Tensor) -> Part:
    if w.numel() <= SAMPLED:
        return Part(w, 1.0)
    strides = count(-(-w.numel() // SAMPLED))
    every = next(k for k in strides if math.gcd(k, w.shape[-1]) == 1)  # otherwise only some columns would be sampled
    some = w.view(-1)[::every]
    return Part(some, w.numel() / some.numel())


class LayerStats:
    def __init__(self, model: AnyModel, every: int):
        """every: steps between measurements; 0: none."""
        self.model, self.every = model, every
        spans = model.store.trained.spans
        self._names: dict[str, list[str]] = {}  # of each group, adjacent in the flat buffer
        for name in spans:
            self._names.setdefault(group_of(name), []).append(name)
        self._slices = {group: slice(spans[names[0]][0], sum(spans[names[-1]])) for group, names in self._names.items()}
        self._before: list[list[tuple[Part, Tensor]]] = []  # by group

    def due(self, step: int) -> bool:
        """step: counted from 1."""
        early = step < self.every and step & (step - 1) == 0
        return self.every > 0 and (early or step % self.every == 0)

    def before(self) -> None:
        """Copy the weights that the step will change."""
        params = self.model.params
        parts = [[part_of(params[name]) for name in names] for names in self._names.values()]
        self._before = [[(part, part.w.clone()) for part in group] for group in parts]

    def after(self, norm: float) -> dict[str, Any]:
        """The event's values. norm: the global gradient norm before clipping. Clipping may have scaled the gradients in place,
        all by one factor, which the global norm undoes."""
        grads, pairs = self.model.store.flat_grads, [pair for group in self._before for pair in group]
        moved = [torch.linalg.vector_norm(part.w - old) for part, old in pairs]
        sizes = [torch.linalg.vector_norm(old) for _, old in pairs]
        found = torch.stack([*(grad_norm(grads[span]) for span in self._slices.values()), *moved, *sizes]).cpu().double()
        norms, *lengths = found.split([len(self._slices), len(pairs), len(pairs)])
        weights = torch.tensor([part.weight for part, _ in pairs], dtype=torch.float64)
        squares = ((x.square() * weights).split([len(group) for group in self._before]) for x in lengths)
        ratios = [float((moved.sum() / size.sum()).sqrt()) for moved, size in zip(*squares, strict=True)]
        self._before = []
        total = torch.linalg.vector_norm(norms)
        norms = norms * torch.where(total > 0, norm / total, 0.0)
        return {
            "grad_norm": dict(zip(self._slices, norms.tolist(), strict=True)),
            "update_ratio": dict(zip(self._slices, ratios, strict=True)),
            "memory_bytes": resident_bytes(),
            "device_memory_bytes": device_bytes(self.model.device),
        }
