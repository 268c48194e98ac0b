"""The errors a user can meet: one catalogue of codes, messages, causes and fixes, and the classes they are raised as.

A message says what, where, expected and got, and how to fix it, in one line. A class is a kind of error, with its own code
and the exit status of the command line; a `Known` error is an instance of a kind with its own code, cause and fix:
`raise EMPTY_DATA(path=path)`. docs/errors.md is generated from this catalogue.
Tested by: tests/test_catalogue.py."""

from tapeless.errors.base import *  # noqa: F403
from tapeless.errors.base import Known, TapelessError
from tapeless.errors.config import *  # noqa: F403
from tapeless.errors.data import *  # noqa: F403
from tapeless.errors.run import *  # noqa: F403

KINDS: list[type[TapelessError]] = [
    kind for kind in list(globals().values()) if isinstance(kind, type) and issubclass(kind, TapelessError)
]
CATALOGUE: list[Known] = []
for _name, _known in list(globals().items()):
    if isinstance(_known, Known):
        _known.code = _name
        CATALOGUE.append(_known)
