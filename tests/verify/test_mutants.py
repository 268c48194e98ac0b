"""The levels pass on the source as it is, and each catches what it should once a mutant is in it."""

import ast
import builtins
import os
import sys
from importlib.util import cache_from_source
from operator import attrgetter
from pathlib import Path

import pytest

from levels import LEVELS
from mutants import places
from mutants.__main__ import main
from mutants.places import PACKAGE, find, markers, parsed, replaced, wildcard
from mutants.run import (
    TWO_LEVELS,
    MutantResult,
    matrix,
    mutated,
    run_mutant,
    run_mutants,
    share_killed_twice,
    survivors,
)
from mutants.table import KERNEL_MUTANTS, LISTED, MUTANTS, Mutant, mutants_of
from tapeless.errors import TapelessError
from tapeless.verify.finding import Finding
from tapeless.verify.fixtures import PARTLY_TRAINED_CASES, ModelCase, Setting
from tapeless.verify.model_judges import by_precision

BY_NUMBER = {mutant.number: mutant for mutant in MUTANTS}

# One mutant for each file where gradients are wired or computed, and levels that must see it whatever else does.
REPRESENTATIVE = {
    "1": {"L2", "L3"},
    "12": {"L2", "L3"},
    "19": {"L0", "L1", "L2", "L3"},
    "27": {"L0", "L1", "L6"},
    "31": {"L1", "L2", "L3"},
    "37": {"L0", "L1", "L2", "L5"},
    "38a": {"L2", "L3"},
    "42": {"L1", "L2", "L6"},
    "44": {"L2", "L5"},
    "X17": {"L1", "L4", "L5"},
    "6": {"L4", "L5"},
    "8": {"L4", "L5"},
    "49": {"L4", "L6"},
    "51a": {"L4", "L6"},
    "53": {"L4", "L5"},
    "54a": {"L1", "L6"},
    "X26": {"L4", "L6"},
    "X35": {"L4", "L5"},
}


def id_of(mutant: Mutant) -> str:
    return mutant.number


def tapeless_modules() -> dict[str, object]:
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] in ("tapeless", "levels")}


@pytest.mark.parametrize("mutant", MUTANTS + KERNEL_MUTANTS, ids=id_of)
def test_its_place_is_found_once_and_the_new_source_compiles(mutant: Mutant) -> None:
    healthy, source = (PACKAGE / mutant.file).read_text(encoding="utf-8"), mutant.source()
    assert ast.dump(ast.parse(source)) != ast.dump(ast.parse(healthy))
    compile(source, mutant.file, "exec")
    known = names_in(ast.parse(healthy)) | set(dir(builtins))
    written = {name for statement in parsed(mutant.new) for name in names_in(statement) if not name.startswith("wild_")}
    bound = {node.id for statement in parsed(mutant.new) for node in ast.walk(statement) if is_bound(node)}
    assert written - bound <= known  # an undefined name would raise, and that would count as found


def names_in(tree: ast.AST) -> set[str]:
    imported = {
        a.asname or a.name for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) for a in node.names
    }
    arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | imported | arguments


def is_bound(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and wildcard(node) is None


def test_every_marker_marks_one_place_of_a_mutant() -> None:
    wanted = {mutant.place.removeprefix("#") for mutant in MUTANTS + KERNEL_MUTANTS if mutant.place.startswith("#")}
    assert sorted(markers()) == sorted(wanted)


@pytest.mark.parametrize(
    ("source", "place", "old", "new", "expected"),
    [
        ("def f(a):\n    return a * a + b\n", "ops:f", "$x * $x", "$x", "return (a) + b"),
        ("def f(a):\n    y = g(a,\n      2, k=3)\n", "ops:f", "g($a, *$r, **$k)", "g(0, *$r, **$k)", "y = (g(0, 2, k=3))"),
        ("class A:\n  def f(self):\n    a = {'x': 1, 'y': 2}\n", "ops:A.f", "{'y': $v, **$r}", "{**$r}", "a = ({'x': 1})"),
        ("def f():\n  if a in b:  # mutant: here\n    a in b\n", "#here", "$a in $b", "True", "if (True):"),
        ("x = 1\ny = 2\nx = 1\n", "ops:", "$a = 1\n$b = 2", "$b = $a", "y = x\nx = 1"),
    ],
)
def test_a_place_is_found_by_its_syntax(
    source: str, place: str, old: str, new: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, monkeypatch, source)
    changed = replaced(find(place, old), new)
    assert expected in changed
    compile(changed, "a.py", "exec")


@pytest.mark.parametrize(
    ("place", "old", "count"),
    [("ops:f", "$x / $y", 0), ("ops:f", "$x + $y", 2), ("ops:g", "$x + $y", 0), ("#nowhere", "$x", 0), ("ops:f", "$x + $x", 1)],
)
def test_a_place_that_is_not_found_once_is_refused(
    place: str, old: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, monkeypatch, "def f(a, b):\n    return (a + a) * (a + b)\n")
    if count == 1:
        assert find(place, old).file == "ops/a.py"
    else:
        with pytest.raises(ValueError, match=f"matches {count} times"):
            find(place, old)


def package(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """A package of one file, in place of the real one."""
    (folder / "ops").mkdir()
    (folder / "ops" / "a.py").write_text(source)
    monkeypatch.setattr("mutants.places.PACKAGE", folder)
    for name in ("files", "tree_of"):
        monkeypatch.setattr(f"mutants.places.{name}", getattr(places, name).__wrapped__)
    find.cache_clear()


def test_every_listed_mutant_is_there() -> None:
    """45 to 47 are bugs of reductions over ranks, and are tested there."""
    assert len(BY_NUMBER) == len(MUTANTS)
    assert {int(mutant.number.rstrip("abc")) for mutant in LISTED} == {*range(1, 45), *range(48, 55)}


def test_the_copy_has_the_mutant_and_leaves_no_trace() -> None:
    modules, meta_path = tapeless_modules(), list(sys.meta_path)
    bytecode = Path(cache_from_source(str(PACKAGE / BY_NUMBER["28"].file)))
    before = bytecode.read_bytes() if bytecode.exists() else None
    healthy = sys.modules["tapeless.ops.rms_norm"]
    with mutated(BY_NUMBER["28"]) as copy:
        assert copy is sys.modules["levels"] is not modules["levels"]
        mutant = sys.modules["tapeless.ops.rms_norm"]
        assert mutant.rms_norm_backward.__code__.co_code != healthy.rms_norm_backward.__code__.co_code
    after = tapeless_modules()
    assert after.keys() == modules.keys()
    assert all(after[name] is module for name, module in modules.items())
    assert sys.meta_path == meta_path
    assert (bytecode.read_bytes() if bytecode.exists() else None) == before


def test_the_package_is_restored_after_an_error() -> None:
    modules = tapeless_modules()
    with pytest.raises(ZeroDivisionError), mutated(BY_NUMBER["28"]):
        raise ZeroDivisionError
    assert all(sys.modules[name] is module for name, module in modules.items())


@pytest.mark.parametrize("level", ["L4", "L5", "L6"])
def test_the_healthy_source_passes(level: str) -> None:
    """The others, case by case: test_op_levels.py (L0, L1), tests/model/test_transformer_grads.py and test_adapters.py (L2),
    tests/model/test_against_hf.py (L3)."""
    findings = list(LEVELS[level]())
    assert findings
    assert [str(finding) for finding in findings if not finding.ok] == []


@pytest.mark.parametrize("case", PARTLY_TRAINED_CASES, ids=attrgetter("name"))
def test_partly_trained_models_pass_in_narrow_dtypes(case: ModelCase) -> None:
    findings = list(by_precision(case))
    assert findings
    assert [str(finding) for finding in findings if not finding.ok] == []


@pytest.mark.parametrize("number", REPRESENTATIVE)
def test_killed_by_the_levels_that_should(number: str) -> None:
    assert run_mutant(BY_NUMBER[number], REPRESENTATIVE[number]).killed_by.keys() == REPRESENTATIVE[number]


@pytest.mark.slow
def test_every_mutant_is_killed_and_nearly_all_by_two_levels() -> None:
    results = run_mutants()
    assert survivors(results) == []
    assert share_killed_twice(results) >= TWO_LEVELS, matrix(results, {})


# A set of kernels with a bug, planted in a file that is loaded whenever kernels are judged.
REGISTERED = """
from dataclasses import replace as _replace
from tapeless.kernels.choose import register_ops as _register
from tapeless.ops.reference import REFERENCE as _R
_wrong = _R.attention._replace(backward=lambda do, saved: tuple(FACTOR * g for g in _R.attention.backward(do, saved)))
_register("planted", _replace(_R, attention=_wrong), dtypes=["float32", "bfloat16"])
"""


@pytest.mark.parametrize(
    ("factor", "levels", "killers"), [("1.01", ["L0", "L1", "L2", "L6"], {"L0", "L1", "L2"}), ("1.0", ["L0", "L6"], set())]
)
def test_a_set_of_kernels_is_checked_by_its_own_levels(factor: str, levels: list[str], killers: set[str]) -> None:
    """That a right set passes all levels is tested in test_kernel_levels.py."""
    old = "NARROW = $dtypes"
    mutant = Mutant("K", "a factor", "verify:", old, old + REGISTERED.replace("FACTOR", factor))
    result = run_mutant(mutant, levels, Setting("planted"))
    assert result.killed_by.keys() == killers


def test_the_folder_of_a_kernel_says_which_set_it_belongs_to() -> None:
    assert {mutant.ops for mutant in MUTANTS} == {"reference"}
    assert {mutant.ops for mutant in KERNEL_MUTANTS} == {"cpu"}
    assert mutants_of("reference") == MUTANTS
    assert mutants_of("nobody's") == ()


def test_numba_keeps_a_mutant_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    config = pytest.importorskip("numba").core.config
    monkeypatch.setenv("NUMBA_CACHE_DIR", "mine")
    config.reload_config()
    with mutated(BY_NUMBER["28"]):
        folder = config.CACHE_DIR
        assert Path(folder).is_dir()
        assert folder == os.environ["NUMBA_CACHE_DIR"]
    assert not Path(folder).exists()
    assert config.CACHE_DIR == os.environ["NUMBA_CACHE_DIR"] == "mine"
    monkeypatch.undo()
    config.reload_config()


def test_mutants_are_not_run_against_levels_that_fail_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = Finding("L0", "check", "oracle", "tensor", 1.0, 0.0)
    monkeypatch.setitem(LEVELS, "L0", lambda: iter([failure]))
    with pytest.raises(TapelessError, match="the levels must pass"):
        run_mutants("none of them")


def test_the_command_names_the_levels_that_find_a_mutant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mutants.run.LEVELS", ["L0", "L1"])
    monkeypatch.setattr("mutants.run.run_mutant.__defaults__", (("L0", "L1"), None))
    assert main(["28"]) == 0
    out, err = capsys.readouterr()
    assert "L1 rms_norm" in out
    assert "28  ··  L1" in err
    with pytest.raises(SystemExit) as stopped:
        main(["999"])
    assert stopped.value.code == 2
    assert "unknown mutant '999'; of ops reference there are 1, 2" in capsys.readouterr().err


def test_results_make_a_matrix() -> None:
    results = [
        MutantResult("1", "one", "ops/a.py", {"L1": "L1 bad", "L2": "L2 bad"}),
        MutantResult("2", "two", "ops/b.py", {}),
        MutantResult("3", "three", "ops/b.py", {"L0": "L0 bad", "L5": "L5 bad"}),
        MutantResult("4", "four", "ops/b.py", {"L6": "L6 bad"}),
    ]
    assert [result.number for result in survivors(results)] == ["2"]
    assert share_killed_twice(results) == 0.5
    table = matrix(results, {"1": True, "2": False, "3": None})
    assert "| 1 one | `ops/a.py` |  | x | x |  |  |  |  | 2 | yes |" in table
    assert "| 2 two | `ops/b.py` |  |  |  |  |  |  |  | 0 | no |" in table
    assert "| 3 three | `ops/b.py` | x |  |  |  |  | x |  | 2 |  |" in table
    assert "| in all | | 1 | 1 | 1 | 0 | 0 | 1 | 1 | | 1 |" in table
    assert "3 of 4 killed, 50% by two or more levels.\n**1 of 2 mutants still train fine**" in table
