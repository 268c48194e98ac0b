"""Initial values. Each parameter has its own seed, derived from the run's seed and its name: the same values on any device,
in any dtype and on any number of ranks.

    scaled-normal   N(0, 0.02^2); output matrices of sublayers divided by (2L)^(1/2), to keep the residual stream's scale
    kaiming         N(0, 2 / fan_in)
    xavier          uniform in ± (6 / (fan_in + fan_out))^(1/2)
Embeddings are N(0, 0.02^2) in all three, norms 1, biases 0. Of an adapter, a is uniform in
± 1 / fan_in^(1/2), so that x a' has the scale of x, and b is 0: it starts without effect."""

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from tapeless.config import nearest
from tapeless.errors import ConfigError
from tapeless.model.params import ParamSpec, ParamStore

STD = 0.02
PLAIN: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever torch's defaults are


def param_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")


def initial_values(spec: ParamSpec, scheme: str, num_layers: int, seed: int) -> Tensor:  # spec.shape, float32 on the CPU
    return _drawn(torch.empty(spec.shape, **PLAIN), spec, scheme, num_layers, seed)


def _drawn(w: Tensor, spec: ParamSpec, scheme: str, num_layers: int, seed: int) -> Tensor:
    """w (spec.shape), float32 on the CPU, filled in place: touching new memory costs more than the draws."""
    if spec.init in ("ones", "zeros"):
        return w.fill_(1.0 if spec.init == "ones" else 0.0)
    generator = torch.Generator("cpu").manual_seed(param_seed(seed, spec.name))
    if spec.init == "embedding":
        return w.normal_(generator=generator).mul_(STD)
    fan_out, fan_in = spec.shape
    if spec.init == "adapter":
        return w.uniform_(generator=generator).mul_(2).sub_(1).div_(math.sqrt(fan_in))
    if scheme == "kaiming":
        return w.normal_(generator=generator).mul_(math.sqrt(2 / fan_in))
    if scheme == "xavier":
        return w.uniform_(generator=generator).mul_(2).sub_(1).mul_(math.sqrt(6 / (fan_in + fan_out)))
    if scheme == "scaled-normal":
        depth = math.sqrt(2 * num_layers) if spec.init == "residual" else 1.0
        return w.normal_(generator=generator).mul_(STD / depth)
    raise ConfigError(f"unknown init {scheme!r}; {nearest(scheme, ('scaled-normal', 'kaiming', 'xavier'))}")


def initialize(store: ParamStore, scheme: str, num_layers: int, seed: int) -> None:
    """In threads, the largest first: torch draws random numbers on one core, and releases the GIL meanwhile."""

    def fill(spec: ParamSpec) -> None:
        w = store.params[spec.name]
        if w.dtype == PLAIN["dtype"] and w.device.type == PLAIN["device"]:
            _drawn(w, spec, scheme, num_layers, seed)
        else:
            w.copy_(initial_values(spec, scheme, num_layers, seed))

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(fill, sorted(store.layout.specs.values(), key=lambda spec: -math.prod(spec.shape))))
