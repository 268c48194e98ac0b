"""Optional packages: imported when a file or command needs one, and named in the error if it is missing.
Tested by: tests/data/test_read.py, tests/data/test_tokenizer.py, tests/interop/test_gguf_export.py."""

from importlib import import_module
from typing import Any

from tapeless.errors import MissingError

# package -> the extra of pyproject.toml that has it
EXTRAS = {"tokenizers": "bpe", "gguf": "gguf", "pyarrow": "tables", "zstandard": "tables", "datasets": "datasets"}


def require_package(name: str, needed_by: object) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise MissingError(f"{needed_by} needs the package `{name}`: pip install 'tapeless[{EXTRAS[name]}]'") from None
