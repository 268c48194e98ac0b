"""The errors a user can meet. Each has a code, and the exit status the command line ends with.

A message says what, where, expected and got, and how to fix it, in one line."""


class TapelessError(Exception):
    code = "FAILED"
    exit_status = 1


class UsageError(TapelessError):
    """A command line that cannot be understood."""

    code = "USAGE"
    exit_status = 2


class ConfigError(TapelessError, ValueError):
    """A configuration that no model can be built from."""

    code = "CONFIG"
    exit_status = 2


class InputError(TapelessError, ValueError):
    """Tokens, targets or tensors that do not fit the model."""

    code = "INPUT"
    exit_status = 2


class OrderError(TapelessError, RuntimeError):
    """Calls in an order that has no meaning, such as backward before forward."""

    code = "ORDER"
    exit_status = 2


class NonFiniteError(TapelessError, ArithmeticError):
    """NaN or infinity where only numbers may be."""

    code = "NONFINITE"
    exit_status = 4


class MissingError(TapelessError, ImportError):
    """An optional package or kernel set was asked for by name and is not there."""

    code = "MISSING"
    exit_status = 2


class DataError(TapelessError, ValueError):
    """Text, token files or tokenizers that cannot be trained on."""

    code = "DATA"
    exit_status = 2


class CheckpointError(TapelessError):
    """A checkpoint that cannot be written or gone on from."""

    code = "CHECKPOINT"
    exit_status = 2


class DamagedError(CheckpointError):
    """A checkpoint whose files are not the ones that were written."""


class LockedError(TapelessError):
    """A run directory that another live process writes to."""

    code = "LOCKED"
    exit_status = 2
