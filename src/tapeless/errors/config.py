"""Errors of the command line and the configuration.

Tested by: tests/test_catalogue.py."""

from tapeless.errors.base import Known, TapelessError


class UsageError(TapelessError):
    """An invalid command line."""

    code = "USAGE"
    exit_status = 2
    fix = "see the command's `--help`"


class ConfigError(TapelessError, ValueError):
    """An invalid configuration of a model or a run."""

    code = "CONFIG"
    exit_status = 2
    fix = "change the field that the message names, by its flag, by `--set`, or in the file"


class MissingError(TapelessError, ImportError):
    """An optional package or kernel set was requested by name and is not installed."""

    code = "MISSING"
    exit_status = 2
    fix = "install the package, or choose an option that does not need it"


UNKNOWN_FLAG = Known(
    UsageError,
    "unknown flag {flag}",
    "a flag that the command does not have; flags are neither ignored nor abbreviated",
    "{nearest} (see {program} --help)",
)
WRONG_TYPE = Known(
    ConfigError,
    "{name} must be {expected}, got {got!r}",
    "a value of the wrong type, such as text for a number",
    "give {name} a value of that type",
)
UNKNOWN_KEY = Known(
    ConfigError,
    "unknown key {key}",
    "a key in a file, in `--set` or in `--override` that is not a field",
    "{nearest}",
)
OUT_OF_RANGE = Known(
    ConfigError,
    "{name} must be {expected}, got {got}",
    "a number out of range, such as an lr that is NaN, negative or 0",
    "give {name} a value in that range",
)
INDIVISIBLE = Known(
    ConfigError,
    "{size} is not divisible by {divisor}",
    "sizes that do not divide: heads split the width equally, and each key head serves the same number of query heads",
    "{fix}",
)
WARMUP_TOO_LONG = Known(
    ConfigError,
    "warmup_steps {warmup} is beyond {total}",
    "an explicit warm-up longer than the run; the default one never is",
    "give --warmup-steps {most} or less, or more steps",
)
SEQ_LEN_TOO_LONG = Known(
    ConfigError,
    "seq_len {seq_len} is beyond max_seq_len {longest}",
    "training windows that are longer than the longest sequence of the model",
    "give --max-seq-len {seq_len} too, which sets both, or --seq-len {longest} or less",
)
