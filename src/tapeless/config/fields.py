"""What the configuration classes share: fields with help texts, and checks of types, choices and ranges.

Tested by: tests/test_config.py."""

import re
from collections.abc import Collection, Iterable
from dataclasses import field, fields
from numbers import Real
from typing import Any

from tapeless.errors import OUT_OF_RANGE, WRONG_TYPE, ConfigError

MAX_INT = 2**63  # every int is below this
INFINITY = float("inf")
FEW = 20  # names that an error lists; among more, one that is only somewhat alike is not what was meant
SECONDS = {"s": 1, "m": 60, "h": 3600}  # per unit of a duration


def option(
    default: Any,
    help: str,
    choices: Collection[str] = (),
    *,
    common: bool = False,
    derived: bool = False,
    by_optimizer: bool = False,
    **bounds: int,
) -> Any:
    """A field with its help text and, if they are few, its allowed values. common: in --help, not only in --help-all. derived:
    None is replaced on construction. by_optimizer: only optimizers that list the field among their `options` read it. bounds:
    those of check_range."""
    marks = {"common": common, "derived": derived, "by_optimizer": by_optimizer, "bounds": bounds}
    return field(default=default, metadata={"help": help, "choices": choices, **marks})


def require(ok: bool, name: str, expected: str, got: Any) -> None:
    if not ok:
        raise OUT_OF_RANGE(name=name, expected=expected, got=got)


def seconds(time: str) -> float:
    """A duration such as 90s in seconds; 0 is no limit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", time)
    require(found is not None or time == "0", "max_time", "a number of s, m or h such as 90s, 10m or 2h, or 0", repr(time))
    return INFINITY if found is None else float(found[1]) * SECONDS[found[2]]


def require_type(ok: bool, name: str, expected: str, got: Any) -> None:
    if not ok:
        raise WRONG_TYPE(name=name, expected=expected, got=got)


def check_range(name: str, value: Any, ge: int | None = None, gt: int | None = None, lt: float = INFINITY) -> None:
    """A number: at least ge, above gt, below lt; with either of the first two it is finite."""
    require_type(isinstance(value, Real) and type(value) is not bool, name, "a number", value)
    if ge is not None:
        expected = f"in [{ge}, {lt})" if lt < INFINITY else f"at least {ge}" if ge else "0 or more"
        require(ge <= value < lt, name, expected, value)
    if gt is not None:
        expected = f"above {gt}" + (f", below {lt}" if lt < INFINITY else "")
        require(gt < value < lt, name, expected, value)


def check_fields(config: Any) -> None:
    """Every field has its declared type, is in its range and one of its choices; an int is accepted for a float."""
    for f in fields(config):
        value = getattr(config, f.name)
        allowed = f.type.__args__ if hasattr(f.type, "__args__") else (f.type,)
        if f.metadata["derived"] and value is None:
            continue
        if float in allowed and type(value) is int and abs(value) < MAX_INT:
            object.__setattr__(config, f.name, float(value))
        elif type(value) not in allowed:
            names = " or ".join("nothing" if t is type(None) else getattr(t, "__name__", str(t)) for t in allowed)
            raise WRONG_TYPE(name=f.name, expected=names, got=value)
        if isinstance(value, str):
            _require_unicode(f.name, value)
        if type(value) is int and not abs(value) < MAX_INT:
            raise OUT_OF_RANGE(name=f.name, expected="below 2^63", got=value)
        if value is not None and f.metadata["bounds"]:
            check_range(f.name, getattr(config, f.name), **f.metadata["bounds"])
        choices = f.metadata["choices"]
        if choices and value not in choices:
            raise ConfigError(f"{f.name} is {value!r}; {nearest(value, choices)}")


def _require_unicode(name: str, value: str) -> None:
    """A file name may be any bytes; Python has those that are not UTF-8 as halves of surrogate pairs."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name} {value!r} is not valid Unicode, and config.toml is a text file; rename it") from None


def nearest(word: str, valid: Iterable[str]) -> str:
    """The hint for a wrong name: the nearest valid one, or all of them if they are few."""
    import difflib  # only errors need it, and `--help` is instant

    valid = list(valid)
    close = difflib.get_close_matches(word, valid, n=1, cutoff=0.5 if len(valid) <= FEW else 0.7)
    if close:
        return f"did you mean {close[0]!r}?"
    return "expected one of " + ", ".join(valid) if len(valid) <= FEW else "no name here is similar"
