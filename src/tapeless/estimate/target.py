"""The machine that a run is estimated for, where it is not this one: a GPU by its name, or an amount of memory.

Tested by: tests/estimate/test_target.py, acceptance/estimate_elsewhere.py."""

from dataclasses import replace
from typing import NamedTuple

import torch

from tapeless.config import TrainConfig, nearest
from tapeless.config.hardware import GPUS, Gpu, parse_memory
from tapeless.errors import ConfigError, MissingError


class Target(NamedTuple):
    name: str
    room: int  # bytes that are free
    gpu: Gpu | None = None  # None: only its memory is known


def target_of(train: TrainConfig, memory: str | None, *, device_is_given: bool) -> tuple[TrainConfig, Target | None]:
    """The configuration as it would run there, and the machine that `device` and `memory` name; None: this one."""
    name = train.device.lower()
    gpu = GPUS.get(name)
    if gpu is None and (memory is None or device_is_given):
        _require_known(train.device, here=memory is None)
    if gpu is None and memory is None:
        return train, None
    room = gpu.free if gpu and memory is None else parse_memory(memory or "")
    if gpu is None and device_is_given and torch.device(name).type != "cuda":
        return train, Target(f"{name} with {memory}", room)
    name = " with ".join(part for part in (name if gpu else "a GPU", memory) if part)
    if train.dtype == "fp8" and gpu is not None and gpu.fp8 is None:
        raise MissingError(f"dtype fp8 needs a GPU with fp8 matmuls (Ada, Hopper or newer); {name} is none: --dtype bfloat16")
    dtype = "bfloat16" if train.dtype == "auto" else train.dtype
    return replace(train, device="cuda", dtype=dtype), Target(name, room, gpu)


def _require_known(name: str, *, here: bool) -> None:
    """An error that helps with a GPU that is not here, or misspelt."""
    known = f"for a GPU that is not here, name it ({', '.join(GPUS)}) or its memory (--memory 24GB)"
    try:
        kind = torch.device(name).type
    except RuntimeError:
        raise ConfigError(f"unknown device {name!r}; {nearest(name.lower(), GPUS)}") from None
    if here and kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} cannot be used here; {known}")
