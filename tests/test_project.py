"""What is stated twice agrees: versions in pyproject.toml, the public CI, the Makefile, the hooks and the changelog; and
CONTRIBUTING.md leads to recipes that are run."""

import re
import tomllib
from itertools import product
from typing import Any

import yaml

import tapeless
from test_docs import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
CI = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PYTHONS = [
    line.rpartition(" ")[2] for line in PROJECT["classifiers"] if line.startswith("Programming Language :: Python :: 3.")
]
(OLDEST,) = (line.removeprefix("torch>=") for line in PROJECT["dependencies"] if line.startswith("torch"))


def jobs(matrix: dict[str, Any]) -> set[tuple[str, ...]]:
    """The combinations of a matrix, as GitHub makes them where `include` has every key."""
    keys = [key for key in matrix if key not in ("include", "exclude")]
    rows = [dict(zip(keys, values, strict=True)) for values in product(*(matrix[key] for key in keys))]
    kept = [row for row in rows if not any(row | excluded == row for excluded in matrix["exclude"])]
    assert all(set(row) == set(keys) for row in matrix["include"])
    return {tuple(row[key] for key in keys) for row in [*kept, *matrix["include"]]}


def test_the_matrix_has_every_python_and_both_ends_of_torch():
    assert list(CI["jobs"]["test"]["strategy"]["matrix"])[:3] == ["os", "python", "torch"]
    found = jobs(CI["jobs"]["test"]["strategy"]["matrix"])
    ends = {f"=={OLDEST}.*", f">={OLDEST}"}
    assert {python for _, python, _ in found} == set(PYTHONS)
    assert {torch for _, _, torch in found} == ends
    systems = {f"{name}-latest" for name in ("ubuntu", "macos", "windows")}
    corners = {(PYTHONS[0], f"=={OLDEST}.*"), (PYTHONS[-1], f">={OLDEST}")}
    assert {(system, *corner) for system in systems for corner in corners} <= found
    assert set(product(["ubuntu-latest"], (PYTHONS[0], PYTHONS[-1]), ends)) <= found


def test_the_versions_agree():
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    assert PYPROJECT["tool"]["mypy"]["python_version"] == PYTHONS[0]
    assert str(CI["jobs"]["make"]["steps"][1]["with"]["python-version"]) == PYTHONS[0]
    pinned = re.search(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.M)[1]
    assert [int(part) for part in pinned.split(".")] >= [int(part) for part in OLDEST.split(".")]


def test_what_is_made_in_public_are_targets():
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))
    assert set(CI["jobs"]["make"]["strategy"]["matrix"]["target"]) <= targets


def test_the_hooks_are_the_lint():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    lint = MAKEFILE.split("\nlint:")[1].split("\n\n")[0]
    tools = re.findall(r"\$\(BIN\)/(ruff check|ruff format|mypy)", lint)
    assert [re.match(r"\.venv/bin/(ruff \w+|mypy)", hook["entry"])[1] for hook in hooks] == tools


def test_the_changelog_has_this_version():
    heading = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)[1]
    assert tapeless.__version__ in heading


def test_every_recipe_has_code_that_is_run():
    """Blocks of docs/extending.md in python and sh are run by test_docs.py."""
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    sections = {
        title.lower().replace(" ", "-"): body for title, body in re.findall(r"^## (.*)\n((?:(?!^## ).*\n)*)", text, re.M)
    }
    linked = re.findall(r"\(docs/extending\.md#([\w-]+)\)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert {"an-op", "a-kernel", "a-sublayer", "an-optimizer", "a-hugging-face-family", "a-data-source"} <= set(linked)
    assert set(linked) <= sections.keys()
    assert [name for name in linked if not re.search(r"^```(python|sh)$", sections[name], re.M)] == []
