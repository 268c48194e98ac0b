"""Which implementation of the ops a model uses. Decided once, here, and logged with its reason; the model never looks at
the device.

`auto` takes the built-in kernels for the device where they can run, else the reference set, and says why. A set asked for by
name that cannot run there is an error, never a silent fallback.
Tested by: tests/model/test_choose.py."""

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NamedTuple

import torch

from tapeless.config import nearest
from tapeless.errors import ConfigError, MissingError
from tapeless.ops.op import OpSet
from tapeless.ops.reference import REFERENCE

log = logging.getLogger("tapeless")


class Backend(NamedTuple):
    build: Callable[[], OpSet]  # a model's own set: it may hold buffers
    devices: Collection[str] | None  # torch device types it runs on; None: any
    dtypes: Collection[str] | None  # names of dtypes it computes in; None: any that torch computes in by itself, not fp8


class Choice(NamedTuple):
    ops: OpSet
    reason: str


def _cpu_ops() -> OpSet:
    try:
        from tapeless.kernels.cpu.jit import announce_first_use
        from tapeless.kernels.cpu.ops import cpu_ops
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingError(f"ops 'cpu' are compiled by numba, which cannot be used here: {error}") from error
    announce_first_use()
    return cpu_ops()


def _triton_ops() -> OpSet:
    try:
        from tapeless.kernels.triton.ops import triton_ops
    except ImportError as error:
        raise MissingError(f"ops 'triton' are compiled by triton, which cannot be used here: {error}") from error
    return triton_ops()


def _fp8_ops() -> OpSet:
    if torch.cuda.get_device_capability() < FP8_CAPABILITY:
        raise MissingError(
            f"dtype fp8 needs a GPU that multiplies in it (Ada, Hopper or newer), not {torch.cuda.get_device_name()}"
        )
    _triton_ops()  # which says what is missing
    from tapeless.kernels.triton.ops import fp8_ops

    return fp8_ops()


_BACKENDS: dict[str, Backend] = {
    "reference": Backend(lambda: REFERENCE, None, None),
    "cpu": Backend(_cpu_ops, ("cpu",), ("float32", "bfloat16")),
    "triton": Backend(_triton_ops, ("cuda",), ("float32", "bfloat16")),
    "triton-fp8": Backend(_fp8_ops, ("cuda",), ("fp8",)),
}
_AUTOMATIC = {"cpu": "cpu", "cuda": "triton"}  # device type -> the set that `auto` takes there
PLAIN_DTYPES = ("float32", "bfloat16", "float64")
FP8_CAPABILITY = (8, 9)


def register_ops(
    name: str,
    ops: OpSet | Callable[[], OpSet],
    *,
    devices: Collection[str] | None = None,
    dtypes: Collection[str] | None = None,
) -> None:
    """Make a set of one's own selectable by name. Start from `dataclasses.replace(REFERENCE, attention=…)`. A set that holds
    buffers is given as the function that builds it: each model then has its own."""
    if isinstance(devices, str) or isinstance(dtypes, str):
        raise ConfigError(f"devices and dtypes are collections of names, such as ['cpu'], got {devices!r} and {dtypes!r}")
    if not name or not (callable(ops) or isinstance(ops, OpSet)):
        raise ConfigError(f"register_ops takes a name and an OpSet, or a function that builds one, got {name!r} and {ops!r}")
    if name == "auto" or name in _BACKENDS:
        raise ConfigError(f"a set of ops named {name!r} is already there; choose another name")

    def build() -> OpSet:
        own = ops() if callable(ops) else ops
        # No shortcut would have the ops that were replaced, and nobody knows whether those wait for the device, or compute
        # something that a recording would not see.
        return replace(own, name=name, non_accumulating=None, decoder=None, capturable=False, capture=None)

    _BACKENDS[name] = Backend(build, devices, dtypes)


def build(name: str, device: torch.device, dtype: str) -> OpSet:
    backend = _BACKENDS[name]
    for what, have, can in (("device", device.type, backend.devices), ("dtype", dtype, backend.dtypes)):
        if have == "fp8" and can is None:
            can = PLAIN_DTYPES
        if can is not None and have not in can:
            raise MissingError(f"ops {name!r} cannot run with {what} {have}; it has {', '.join(sorted(can))}")
    return backend.build()


def choose(request: str, device: torch.device, dtype: str) -> Choice:
    if request == "auto":
        choice = _automatic(device, dtype)
    elif request not in _BACKENDS:
        raise ConfigError(f"unknown set of ops {request!r}; {nearest(request, ['auto', *_BACKENDS])}")
    else:
        choice = Choice(build(request, device, dtype), "asked for by name")
    log.info("ops: %s (%s)", choice.ops.name, choice.reason)
    return choice


def _automatic(device: torch.device, dtype: str) -> Choice:
    if dtype == "fp8":  # asked for by name, so that no other precision may quietly take its place
        return Choice(build("triton-fp8", device, dtype), "products in eight bits, the head's in bfloat16")
    name, maker = _AUTOMATIC.get(device.type), "rocm" if device.type == "cuda" and torch.version.hip else device.type
    if name is None or maker == "rocm":  # AMD's GPUs are `cuda` to torch
        return Choice(REFERENCE, f"plain torch: there are no built-in kernels for {maker}")
    try:
        return Choice(build(name, device, dtype), f"the built-in kernels for {device.type} in {dtype}")
    except MissingError as error:
        return Choice(REFERENCE, f"plain torch: {error}")
