"""The documentation site without building it (`make docs` does, strictly): its navigation, its API reference, its links."""

import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

import tapeless

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.append(str(DOCS))
import site_hook as site  # noqa: E402

CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def pages(entry: object) -> Iterator[str]:
    for part in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from pages(part)
    if isinstance(entry, str):
        yield entry


def test_the_navigation_has_every_page_once():
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    made = {f"api/{name}.md" for name in (*site.API, "ops")} | {"index.md"}
    listed = list(pages(CONFIG["nav"]))
    assert sorted(listed) == sorted(written | made)
    assert list(CONFIG["nav"][-1]) == ["Project"]  # which the pages of the root join


def test_the_reference_has_every_public_name():
    names = [name for _, _, names in site.API.values() for name in names]
    assert len(set(names)) == len(names)
    top = {name for name in names if "." not in name}
    assert top == set(tapeless.__all__) - {"__version__", "optim"}
    assert {name.removeprefix("optim.") for name in set(names) - top} == set(tapeless.optim.__all__)


def test_what_the_reference_names_is_documented():
    """By its docstring, or, a class, by that of its file."""
    for name in [name for _, _, names in site.API.values() for name in names if name not in ("STOP", "REFERENCE")]:  # values
        found = attrgetter(name)(tapeless)
        assert found.__doc__ or (isinstance(found, type) and sys.modules[found.__module__].__doc__), name


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("index.md", "docs/tutorial.md", "tutorial.md"),
        ("index.md", "examples/simple_lm.py", "source/examples/simple_lm.py.md"),
        ("training.md", "settings.md", "settings.md"),
        ("training.md", "../README.md", "index.md"),
        ("training.md", "../src/tapeless/ops/op.py", "source/src/tapeless/ops/op.py.md"),
        ("derivations/norms.md", "../notation.md", "../notation.md"),
        ("derivations/norms.md", "../../src/tapeless/ops/", "../source/src/tapeless/ops.md"),
    ],
)
def test_a_link_of_the_repository_becomes_one_of_the_site(page: str, link: str, expected: str):
    assert site.rewritten(page, f"[a]({link}#b), [c](https://example.org)") == f"[a]({expected}#b), [c](https://example.org)"
    assert site.rewritten(page, f"```text\n[a]({link})\n```") == f"```text\n[a]({link})\n```"


def test_a_page_named_by_its_file_is_named_by_its_title():
    assert site.rewritten("training.md", "[data.md](data.md)") == "[Data and tokenizers](data.md)"


def test_a_picture_follows_the_theme():
    text = site.rewritten("index.md", (ROOT / "README.md").read_text())
    assert '(pictures/report-top-light.png#only-light){ width="720" }\n![' in text
    assert '(pictures/report-top-dark.png#only-dark){ width="720" }' in text
    assert "<picture>" not in text


def test_formulas_of_docstrings_are_code():
    assert site.as_markdown("RoPE.\n    a < b * c\nSaved: x < y * `z * z`.") == (
        "RoPE.\n\n    a < b * c\n\nSaved: x &lt; y \\* `z * z`."
    )


def test_no_op_is_left_out():
    text = site.ops_page()
    assert all(f"## {path.stem}\n" in text for path in (ROOT / "src/tapeless/ops").glob("[!_]*.py"))
    assert "dx = r (dn - n mean_C(dn n))" in text


def test_the_site_asks_no_other_host():
    assert CONFIG["theme"]["font"] is False
    assert "://" not in (ROOT / "mkdocs.yml").read_text() + (DOCS / "site.css").read_text()
