"""Which implementation of the ops a model uses. Chosen once, here, and logged with the reason; the model never looks at the
device.

`auto` takes the built-in kernels for the device if they can run there, else the reference set, and logs why. A set requested by
name that cannot run is an error, never a silent fallback.
Tested by: tests/model/test_choose.py."""

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NamedTuple

import torch

from tapeless.config import nearest
from tapeless.errors import ConfigError, MissingError
from tapeless.kernels.private_api import exists
from tapeless.ops.op import OpSet
from tapeless.ops.reference import REFERENCE

log = logging.getLogger("tapeless")


class Backend(NamedTuple):
    build: Callable[[torch.device], OpSet]  # a new set for each model, since it may hold buffers
    devices: Collection[str] | None  # torch device types it runs on; None: any
    dtypes: Collection[str] | None  # names of dtypes it computes in; None: all but fp8


class Choice(NamedTuple):
    ops: OpSet
    reason: str


def _cpu_ops(device: torch.device) -> OpSet:
    try:
        from tapeless.kernels.cpu.ops import cpu_ops
    except (AttributeError, ImportError, OSError, RuntimeError) as error:  # the first: numba's internals have changed
        raise MissingError(f"ops 'cpu' are compiled by numba, which cannot be used here: {error}") from error
    return cpu_ops()


def _triton_ops(device: torch.device) -> OpSet:
    try:
        from tapeless.kernels.triton.ops import triton_ops
    except ImportError as error:
        raise MissingError(f"ops 'triton' are compiled by triton, which cannot be used here: {error}") from error
    return triton_ops()


def _fp8_ops(device: torch.device) -> OpSet:
    if torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise MissingError(
            f"dtype fp8 needs a GPU with fp8 matmuls (Ada, Hopper or newer); {device} is {torch.cuda.get_device_name(device)}"
        )
    if not exists("torch._scaled_mm"):
        raise MissingError(f"dtype fp8 needs torch._scaled_mm, which torch {torch.__version__} lacks")
    _triton_ops(device)  # raises the reason if it cannot
    from tapeless.kernels.triton.ops import fp8_ops

    return fp8_ops()


_BACKENDS: dict[str, Backend] = {
    "reference": Backend(lambda device: REFERENCE, None, None),
    "cpu": Backend(_cpu_ops, ("cpu",), ("float32", "bfloat16")),
    "triton": Backend(_triton_ops, ("cuda",), ("float32", "bfloat16")),
    "triton-fp8": Backend(_fp8_ops, ("cuda",), ("fp8",)),
}
_AUTOMATIC = {"cpu": "cpu", "cuda": "triton"}  # device type -> the set that `auto` takes
PLAIN_DTYPES = ("float32", "bfloat16", "float64")
FP8_CAPABILITY = (8, 9)


def register_ops(
    name: str,
    ops: OpSet | Callable[[], OpSet],
    *,
    devices: Collection[str] | None = None,
    dtypes: Collection[str] | None = None,
) -> None:
    """Make another set selectable by name. ops: the set; start from `dataclasses.replace(REFERENCE, attention=…)`. For a set
    that holds buffers, pass the function that builds it: each model then has its own. devices: torch device types it runs on;
    None: any. dtypes: names of dtypes it computes in; None: all but fp8."""
    if isinstance(devices, str) or isinstance(dtypes, str):
        raise ConfigError(f"devices and dtypes are collections of names, such as ['cpu'], got {devices!r} and {dtypes!r}")
    if not name or not (callable(ops) or isinstance(ops, OpSet)):
        raise ConfigError(f"register_ops takes a name and an OpSet, or a function that builds one, got {name!r} and {ops!r}")
    if name == "auto" or name in _BACKENDS:
        raise ConfigError(f"a set of ops named {name!r} already exists; choose another name")

    def build(device: torch.device) -> OpSet:
        own = ops() if callable(ops) else ops
        # Shortcuts would bypass the replaced ops, which may wait for the device or compute something that a capture misses.
        return replace(own, name=name, non_accumulating=None, decoder=None, sampler=None, capture=None)

    _BACKENDS[name] = Backend(build, devices, dtypes)


def build(name: str, device: torch.device, dtype: str) -> OpSet:
    _check(name, device, dtype)
    return _BACKENDS[name].build(device)


def _check(name: str, device: torch.device, dtype: str) -> None:
    if name not in _BACKENDS:
        raise ConfigError(f"unknown set of ops {name!r}; {nearest(name, ['auto', *_BACKENDS])}")
    backend = _BACKENDS[name]
    for what, have, can in (("device", device.type, backend.devices), ("dtype", dtype, backend.dtypes)):
        if have == "fp8" and can is None:
            can = PLAIN_DTYPES
        if can is not None and have not in can:
            raise MissingError(f"ops {name!r} cannot run with {what} {have}; it has {', '.join(sorted(can))}")


def planned(request: str, device: torch.device, dtype: str) -> str:
    """The name of the set that is taken on a machine which has all that the built-in kernels need, unlike perhaps this one."""
    if request != "auto":
        _check(request, device, dtype)
        return request
    name = "triton-fp8" if dtype == "fp8" else _AUTOMATIC.get(device.type, "reference")
    return name if dtype in (_BACKENDS[name].dtypes or PLAIN_DTYPES) else "reference"


def choose(request: str, device: torch.device, dtype: str) -> Choice:
    choice = _automatic(device, dtype) if request == "auto" else Choice(build(request, device, dtype), "requested by name")
    log.info("ops: %s (%s)", choice.ops.name, choice.reason)
    return choice


def _automatic(device: torch.device, dtype: str) -> Choice:
    if dtype == "fp8":  # requested by name: no other precision may silently replace it
        return Choice(build("triton-fp8", device, dtype), "matmuls in fp8, the head's in bfloat16")
    name, maker = _AUTOMATIC.get(device.type), "rocm" if device.type == "cuda" and torch.version.hip else device.type
    if name is None or maker == "rocm":  # torch calls AMD's GPUs `cuda`
        return Choice(REFERENCE, f"plain torch: there are no built-in kernels for {maker}")
    try:
        return Choice(build(name, device, dtype), f"the built-in kernels for {device.type} in {dtype}")
    except MissingError as error:
        return Choice(REFERENCE, f"plain torch: {error}")
