"""The catalogue: every error in it can be raised, has a hint, and stands in the docs; every error that is raised is in it."""

import re
import string
from pathlib import Path

import pytest

from tapeless.errors import CATALOGUE, KINDS, UNKNOWN_KEY, ConfigError, DataError, Known, TapelessError

ROOT = Path(__file__).parents[1]
SOURCES = {path: path.read_text() for path in (ROOT / "src").rglob("*.py")}


def name_of(known: Known) -> str:
    return known.code


def facts_of(known: Known) -> dict[str, object]:
    fields = {
        field: spec for text in (known.message, known.fix) for _, field, spec, _ in string.Formatter().parse(text) if field
    }
    return {field: 7 if spec else f"<{field}>" for field, spec in fields.items()}


@pytest.mark.parametrize("known", CATALOGUE, ids=name_of)
def test_it_is_one_line_with_its_code_and_a_hint(known: Known):
    error = known(**facts_of(known))
    assert isinstance(error, known.kind)
    assert error.code == known.code
    assert error.exit_status == 2
    assert str(error).endswith(known.fix.format(**facts_of(known)))
    assert all(text and "\n" not in text for text in (known.message, known.cause, known.fix, str(error)))


def test_codes_are_unique():
    codes = [known.code for known in CATALOGUE] + [kind.code for kind in KINDS]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[A-Z0-9_]+", code) for code in codes)


@pytest.mark.parametrize("known", CATALOGUE, ids=name_of)
def test_it_is_raised_somewhere_under_its_own_name(known: Known):
    assert any(re.search(rf"\b{known.code}\b.*\(", text) for path, text in SOURCES.items() if path.parent.name != "errors")


def test_whatever_is_raised_is_a_kind():
    names = {kind.__name__ for kind in KINDS}
    defined = {name for text in SOURCES.values() for name in re.findall(r"^class (\w+Error)\(", text, re.M)}
    assert defined <= names


def test_what_a_fact_holds_is_not_read_as_a_template():
    assert "unknown key {train}" in str(UNKNOWN_KEY(key="{train}", nearest="{}"))


def test_a_place_in_front_keeps_code_and_kind():
    error = UNKNOWN_KEY(key="a", nearest="b").at("file.toml")
    assert (type(error), error.code, str(error)) == (ConfigError, "UNKNOWN_KEY", "file.toml: unknown key a; b")


def test_an_error_of_a_kind_has_the_kinds_code():
    assert DataError("x").code == "DATA"
    assert TapelessError("x").exit_status == 1


@pytest.mark.parametrize("code", [*(known.code for known in CATALOGUE), *(kind.code for kind in KINDS)])
def test_it_stands_in_the_docs(code: str):
    assert f"`{code}`" in (ROOT / "docs" / "errors.md").read_text()
