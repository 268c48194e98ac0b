"""The base class of every error, with a code, an exit status and a fix; and `Known`, an entry of the catalogue.

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
        placed = type(self)(f"{where}: {self}")
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
