"""Files that end. A pipe is waited for until someone writes into it, and a device such as /dev/zero is read until memory is
full; a link to one may be in place of any file that is given or expected.

Tested by: tests/test_regular.py."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any


def regular(path: Path) -> Path:
    """The path of a regular file, to be read as a whole; raises the OSError of open() for everything else."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # open() has an error of its own for a folder
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path


def read_json(path: Path) -> Any:
    """The value in a file; ValueError if it is not JSON, or nested more deeply than Python can read."""
    try:
        return json.loads(regular(path).read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
