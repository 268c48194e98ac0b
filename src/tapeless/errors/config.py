"""Errors of the command line and the configuration.

Tested by: tests/test_catalogue.py."""

from tapeless.errors.base import Known, TapelessError


class UsageError(TapelessError):
    """A command line that cannot be understood."""

    code = "USAGE"
    exit_status = 2
    fix = "add `--help` to the command to see what it takes"


class ConfigError(TapelessError, ValueError):
    """A configuration that no model or run can be built from."""

    code = "CONFIG"
    exit_status = 2
    fix = "change the field that the message names, by its flag, by `--set`, or in the file"


class MissingError(TapelessError, ImportError):
    """An optional package or kernel set was asked for by name and is not there."""

    code = "MISSING"
    exit_status = 2
    fix = "install the package, or choose what needs none"


UNKNOWN_FLAG = Known(
    "UNKNOWN_FLAG",
    UsageError,
    "unknown flag {flag}",
    "a flag that the command does not have; nothing is ignored, and nothing abbreviated",
    "{nearest} (see {program} --help)",
)
WRONG_TYPE = Known(
    "WRONG_TYPE",
    ConfigError,
    "{name} must be {expected}, got {got!r}",
    "a value of another type than the field's, such as text where a number is meant",
    "give {name} a value of that type",
)
UNKNOWN_KEY = Known(
    "UNKNOWN_KEY",
    ConfigError,
    "unknown key {key}",
    "a key in a file, in `--set` or in `--override` that no field has",
    "{nearest}",
)
OUT_OF_RANGE = Known(
    "OUT_OF_RANGE",
    ConfigError,
    "{name} must be {expected}, got {got}",
    "a number outside of what makes sense, such as an lr that is NaN, negative or 0",
    "give {name} a value in that range",
)
INDIVISIBLE = Known(
    "INDIVISIBLE",
    ConfigError,
    "{name} {value} is not divisible by {by} {divisor}",
    "sizes that do not go into each other: heads are equal parts of the width, and key heads serve equally many query heads",
    "{fix}",
)
WARMUP_TOO_LONG = Known(
    "WARMUP_TOO_LONG",
    ConfigError,
    "warmup_steps {warmup} is beyond {total}",
    "an explicit warm-up that would not be over when the run is; the default one always is",
    "give --warmup-steps {most} or less, or more steps",
)
