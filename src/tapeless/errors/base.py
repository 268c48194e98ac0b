"""The base class of every error, with a code, an exit status and a fix; `Known`, an entry of the catalogue; and the errors of
models and their gradients, and of the processes that benchmark them.

Tested by: tests/test_catalogue.py."""

from dataclasses import dataclass
from typing import Any, Self


class TapelessError(Exception):
    """A failure while running."""

    code = "FAILED"
    exit_status = 1
    fix = "the message says what was expected"

    def at(self, where: object) -> Self:
        """The same error with its location in front of the message."""
        placed = type(self)(f"{where}: {self}" if where else str(self))
        placed.code = self.code
        return placed


@dataclass
class Known:
    """One error with its cause and fix. `message` and `fix` are templates, filled in when it is raised."""

    kind: type[TapelessError]
    message: str
    cause: str
    fix: str
    code: str = ""  # its name in the catalogue

    def __call__(self, **facts: Any) -> TapelessError:
        error = self.kind(f"{self.message}; {self.fix}".format(**facts))
        error.code = self.code
        return error


class InputError(TapelessError, ValueError):
    """Tokens, targets or tensors that do not fit the model."""

    code = "INPUT"
    exit_status = 2
    fix = "pass what the message expects"


class OrderError(TapelessError, RuntimeError):
    """Calls in the wrong order, such as backward before forward."""

    code = "ORDER"
    exit_status = 2
    fix = "call in the order that the message names"


class NonFiniteError(TapelessError, ArithmeticError):
    """NaN or infinity in a loss, a gradient or a weight. Nothing was updated."""

    code = "NONFINITE"
    exit_status = 4
    fix = "resume from the last good checkpoint, with a smaller lr; the dump in the run's directory names the first bad tensor"


class InvariantError(TapelessError, ArithmeticError):
    """An identity that every correct gradient satisfies is violated (`--check-invariants-every`)."""

    code = "INVARIANT"
    exit_status = 3
    fix = "run `tapeless gradcheck` on the model; try `--ops reference`, and test the machine's memory"


class GradientError(TapelessError, ArithmeticError):
    """The gradients of this model are wrong on its first batch. Nothing was trained."""

    code = "GRADIENTS"
    exit_status = 3
    fix = "run `tapeless gradcheck` on the model; try `--ops reference`"


class WorkerError(TapelessError):
    """A benchmark candidate that cannot be measured, with the reason."""

    code = "BENCH"
    fix = "leave it out, or install what the message names"
