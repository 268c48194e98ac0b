"""Corpora that come with every Python, so that the first run needs no download.

    stdlib        the sources of the running interpreter's standard library, a document each
    stdlib-docs   their prose: the docstrings of each file, and the help topics of `help()`
Excluded: tests, third-party packages, tables (codecs, the build's configuration), and what some systems remove (idlelib,
tkinter …), so that most machines of one Python version have the same corpus. At most LIMIT characters: files are taken in the
order of a hash of their path, which spreads the cut over the alphabet, and listed by path.
Tested by: tests/data/test_corpora.py."""

import ast
import hashlib
import os
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

from tapeless.errors import DataError

LIMIT = 6_000_000
TOPICS = "pydoc_data/topics.py"
SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "distutils", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data"}
SKIPPED_FOLDERS |= {"site-packages", "test", "tests", "tkinter", "turtledemo"}
SKIPPED_FILES = ("_sysconfigdata", "python-config", "turtle")


def stdlib() -> dict[str, str]:  # path -> text
    root = Path(sysconfig.get_paths()["stdlib"])
    documents, length = {}, 0
    for path in sorted(_paths(root), key=lambda path: hashlib.sha256(path.encode()).digest()):
        text = _source(root / path)
        if text.strip() and length + len(text) <= LIMIT:
            length += len(text)
            documents[path] = text
    if not documents:
        raise DataError(f"{root}: this Python has no library sources; give your own text with --dataset-path")
    return dict(sorted(documents.items()))


def stdlib_docs() -> dict[str, str]:  # path -> text
    documents = {path: docstrings(text) for path, text in stdlib().items()}
    topics = Path(sysconfig.get_paths()["stdlib"], TOPICS)
    if topics.is_file():
        documents[TOPICS] = strings(_source(topics))
    return {path: text for path, text in documents.items() if text.strip()}


def docstrings(source: str) -> str:
    """Every docstring of a file in its order, unindented, an empty line between two."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(_parse(source)) if isinstance(node, documented)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return "".join(f"{text.strip()}\n\n" for node in nodes if (text := ast.get_docstring(node)))


def strings(source: str) -> str:
    """The values of a file that is one large dictionary of texts."""
    values = [value for node in ast.walk(_parse(source)) if isinstance(node, ast.Dict) for value in node.values]
    return "".join(
        f"{node.value.strip()}\n\n" for node in values if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _paths(root: Path) -> Iterator[str]:  # relative, with forward slashes
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - SKIPPED_FOLDERS  # not even listed: site-packages may hold 100,000 files
        for name in names:
            if name.endswith(".py") and not name.startswith(SKIPPED_FILES):
                yield Path(folder, name).relative_to(root).as_posix()


def _source(path: Path) -> str:
    with tokenize.open(path) as file:  # uses the encoding that the file declares
        return file.read()


def _parse(source: str) -> ast.Module:
    with warnings.catch_warnings(action="ignore"):  # deprecated escapes in strings
        return ast.parse(source)
