"""Which implementation of the ops a model uses. Decided once, here, and logged with its reason; the model never looks at
the device.

`auto` is the reference set until another is built in. A set asked for by name that cannot run there is an error, never
a silent fallback."""

import logging
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import torch

from tapeless.config import nearest
from tapeless.errors import ConfigError, MissingError
from tapeless.ops.op import OpSet
from tapeless.ops.reference import REFERENCE

log = logging.getLogger("tapeless")


class Backend(NamedTuple):
    ops: OpSet
    devices: Collection[str] | None  # torch device types it runs on; None: any
    dtypes: Collection[str] | None  # names of dtypes it computes in; None: any


class Choice(NamedTuple):
    ops: OpSet
    reason: str


_BACKENDS: dict[str, Backend] = {"reference": Backend(REFERENCE, None, None)}


def register_ops(
    name: str, ops: OpSet, *, devices: Collection[str] | None = None, dtypes: Collection[str] | None = None
) -> None:
    """Make a set of one's own selectable by name. Start from `dataclasses.replace(REFERENCE, attention=…)`."""
    if isinstance(devices, str) or isinstance(dtypes, str):
        raise ConfigError(f"devices and dtypes are collections of names, such as ['cpu'], got {devices!r} and {dtypes!r}")
    if name == "auto" or name in _BACKENDS:
        raise ConfigError(f"a set of ops named {name!r} is already there; choose another name")
    _BACKENDS[name] = Backend(replace(ops, name=name), devices, dtypes)


def choose(request: str, device: torch.device, dtype: str) -> Choice:
    if request == "auto":
        choice = Choice(REFERENCE, f"plain torch, the only built-in set for {device.type} in {dtype}")
    elif request not in _BACKENDS:
        raise ConfigError(f"unknown set of ops {request!r}; {nearest(request, ['auto', *_BACKENDS])}")
    else:
        backend = _BACKENDS[request]
        for what, have, can in (("device", device.type, backend.devices), ("dtype", dtype, backend.dtypes)):
            if can is not None and have not in can:
                raise MissingError(f"ops {request!r} cannot run with {what} {have}; it has {', '.join(sorted(can))}")
        choice = Choice(backend.ops, "asked for by name")
    log.info("ops: %s (%s)", choice.ops.name, choice.reason)
    return choice
