"""The public names: documented with every argument, typed for a checker's strictest mode, and no others."""

import dataclasses
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

import tapeless
from test_site import site

ROOT = Path(__file__).parents[1]
NAMES = [name for _, _, names in site.API.values() for name in names]
CALLED = [name for name in NAMES if callable(attrgetter(name)(tapeless))]
USER = ROOT / "tests" / "python_user.py"


def is_record(found: Any) -> bool:
    """Whose arguments are its fields, each with a help text or a comment."""
    return dataclasses.is_dataclass(found) or (isinstance(found, type) and issubclass(found, tuple))


def docs_of(found: Any) -> str:
    classes = [c.__init__.__doc__ or "" for c in inspect.getmro(found)] if isinstance(found, type) else []
    return "\n".join([inspect.getdoc(found) or "", *classes])


@pytest.mark.parametrize("name", CALLED)
def test_every_argument_is_explained(name: str):
    found = attrgetter(name)(tapeless)
    if not is_record(found) and not (isinstance(found, type) and issubclass(found, Exception)):
        parameters = inspect.signature(found).parameters
        assert [p for p in parameters if not re.search(rf"\b{p}\b", docs_of(found))] == []


def methods(found: type) -> Iterator[tuple[str, Any]]:
    for name, value in inspect.getmembers(found):
        if not name.startswith("_") and (inspect.isroutine(value) or isinstance(value, property)) and not is_record(found):
            yield name, value


@pytest.mark.parametrize("name", [name for name in CALLED if isinstance(attrgetter(name)(tapeless), type)])
def test_every_method_is_explained(name: str):
    found = attrgetter(name)(tapeless)
    assert vars(found)["__doc__"]  # not inherited
    assert [method for method, value in methods(found) if not inspect.getdoc(value)] == []


def check(script: Path) -> subprocess.CompletedProcess[str]:
    """As somebody who installed the package does; with a cache, since torch takes long to read."""
    mypy = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache" / "user"), str(script)]
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": ""}
    return subprocess.run(mypy, cwd=script.parent, env=environment, capture_output=True, text=True, check=False)


def test_a_program_with_every_name_is_typed(tmp_path: Path):
    """And one with mistakes has as many errors."""
    program = tmp_path / "program.py"
    mistakes = """
tapeless.trian("tiny")
reveal_type(model.generate("The "))
opt.step("fast")
tapeless.optim.AdamW(model.params, model.grads, beta3=0.5)
tapeless.train("tiny", batches=rate)
"""
    text = USER.read_text()
    used = set(re.findall(r"\btapeless\.((?:optim\.)?\w+)", text)) - {"optim"}
    assert used == {*NAMES, "__version__"}
    program.write_text(text + mistakes)
    done = check(program)
    last, count = len(text.splitlines()), len(mistakes.strip().splitlines())
    marks = r'program\.py:(\d+): (?:error|note: Revealed type is "(?:builtins\.)?str")'
    found = map(int, re.findall(marks, done.stdout))
    assert sorted(set(found)) == [last + 1 + i for i in range(1, count + 1)], done.stdout
