"""The registry of Hugging Face families: every module of this package is one; plugins call `register`.
Tested by: tests/interop/test_families.py."""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from tapeless.config import AnyModelConfig, ModelConfig
from tapeless.errors import ConfigError, InputError
from tapeless.interop.family import Family

FAMILIES: dict[str, Family] = {}  # by the name of their class in transformers


def register(family: Family) -> None:
    if family.name in FAMILIES:
        raise ConfigError(f"the Hugging Face family {family.name} is registered twice")
    FAMILIES[family.name] = family


def family_of(config: AnyModelConfig) -> Family:
    """The family that expresses this architecture; an error with the nearest one and the reasons if there is none."""
    if not isinstance(config, ModelConfig):
        raise ConfigError("a SimpleLM has no attention, and every Hugging Face family has; export a transformer")
    misfits = {name: family.misfits(config) for name, family in FAMILIES.items()}
    name = min(misfits, key=lambda name: len(misfits[name]))
    if misfits[name]:
        reasons = "; ".join(misfits[name])
        raise ConfigError(f"no Hugging Face family has this architecture; the nearest is {name}, but there {reasons}")
    return FAMILIES[name]


def family_named(settings: Mapping[str, Any], where: str) -> Family:
    """The family of a config.json."""
    names = settings.get("architectures")
    for name, family in FAMILIES.items():
        if names == [name]:
            return family
    raise InputError(f"{where}: architectures is {names!r:.80}; expected a list with one of {', '.join(FAMILIES)}")


for _module in iter_modules(__path__):
    register(import_module(f"{__name__}.{_module.name}").FAMILY)
