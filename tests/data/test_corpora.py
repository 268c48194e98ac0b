"""The interpreter's own sources: real files, no tests or tables among them, within the limit, the same each time."""

import ast
import sysconfig
from pathlib import Path

import pytest

from tapeless.data import corpora
from tapeless.data.corpora import docstrings, stdlib, stdlib_docs, strings
from tapeless.errors import DataError


def test_stdlib_is_the_library():
    documents = stdlib()
    names = list(documents)
    assert names == sorted(names)
    assert {"json/decoder.py", "argparse.py", "asyncio/tasks.py"} & set(names)
    assert not any("test" in name.split("/")[:-1] or "site-packages" in name or name.startswith("encodings") for name in names)
    assert 4_000_000 < sum(map(len, documents.values())) <= corpora.LIMIT
    root = Path(sysconfig.get_paths()["stdlib"])
    for name in names[::50]:
        assert documents[name].encode() == (root / name).read_bytes()
    assert documents == stdlib()


def library(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one in place of the interpreter's."""
    monkeypatch.setattr(corpora.sysconfig, "get_paths", lambda: {"stdlib": str(root)})


def test_the_limit_is_kept_by_a_fixed_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for i in range(100):
        (tmp_path / f"m{i:02}.py").write_text("x = 1\n" * 10)
    library(tmp_path, monkeypatch)
    monkeypatch.setattr(corpora, "LIMIT", 1230)
    documents = stdlib()
    assert len(documents) == 20
    assert documents == stdlib()
    assert list(documents) != [f"m{i:02}.py" for i in range(20)]


def test_docs_are_docstrings_and_topics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.py").write_text(
        '"""The module."""\nx = "no"\nclass A:\n    """A class."""\n    def f(self):\n        """F."""\n'
    )
    (tmp_path / "b.py").write_text("pass\n")
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text("topics = {'if': 'About if.', 'for': 'About for.'}\n")
    library(tmp_path, monkeypatch)
    assert stdlib_docs() == {
        "a.py": "The module.\n\nA class.\n\nF.\n\n",
        "pydoc_data/topics.py": "About if.\n\nAbout for.\n\n",
    }


def test_english_of_a_real_file():
    text = docstrings(Path(ast.__file__).read_text(encoding="utf-8"))
    assert text.startswith("ast\n~~~\n\nThe `ast` module helps")
    assert "Parse the source into an AST node." in text
    assert "import sys" not in text


def test_old_escapes_are_no_warning():
    assert docstrings('"""a \\d b"""') == "a \\d b\n\n"
    assert strings("topics = {'a': 'a \\d b'}") == "a \\d b\n\n"


def test_no_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    library(tmp_path, monkeypatch)
    with pytest.raises(DataError, match="this Python has no library sources; give your own text with --dataset-path"):
        stdlib()
