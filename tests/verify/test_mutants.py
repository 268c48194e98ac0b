"""The levels pass on the source as it is, and each catches what it should once a mutant is in it."""

import os
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from tapeless.errors import TapelessError
from tapeless.verify.finding import Finding
from tapeless.verify.fixtures import Setting
from tapeless.verify.kernel_mutants import KERNEL_MUTANTS, mutants_of
from tapeless.verify.levels import LEVELS
from tapeless.verify.mutant_table import LISTED, MUTANTS, PACKAGE, Mutant
from tapeless.verify.mutants import (
    TWO_LEVELS,
    MutantResult,
    matrix,
    mutated,
    run_mutant,
    run_mutants,
    share_killed_twice,
    survivors,
)

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
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] == "tapeless"}


@pytest.mark.parametrize("mutant", MUTANTS + KERNEL_MUTANTS, ids=id_of)
def test_old_text_occurs_once_and_the_new_source_compiles(mutant: Mutant) -> None:
    path = PACKAGE / mutant.file
    assert path.read_text(encoding="utf-8").count(mutant.old) == 1
    assert mutant.new != mutant.old
    compile(mutant.source(), mutant.file, "exec")


def test_every_listed_mutant_is_there() -> None:
    """45 to 47 are bugs of reductions over ranks, and are tested there."""
    assert len(BY_NUMBER) == len(MUTANTS)
    assert {int(mutant.number.rstrip("abc")) for mutant in LISTED} == {*range(1, 45), *range(48, 55)}


def test_an_old_text_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="occurs 0 times"):
        MUTANTS[0]._replace(old="nowhere to be found").source()


def test_the_copy_has_the_mutant_and_leaves_no_trace() -> None:
    modules, meta_path = tapeless_modules(), list(sys.meta_path)
    bytecode = Path(cache_from_source(str(PACKAGE / BY_NUMBER["28"].file)))
    before = bytecode.read_bytes() if bytecode.exists() else None
    healthy = sys.modules["tapeless.ops.rms_norm"]
    with mutated(BY_NUMBER["28"]) as copy:
        assert copy is sys.modules["tapeless.verify.levels"] is not modules["tapeless.verify.levels"]
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


@pytest.mark.parametrize("level", LEVELS)
def test_the_healthy_source_passes(level: str) -> None:
    findings = list(LEVELS[level]())
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


@pytest.mark.parametrize(("factor", "killers"), [("1.01", {"L0", "L1", "L2"}), ("1.0", set())])
def test_a_set_of_kernels_is_judged_by_its_own_levels(factor: str, killers: set[str]) -> None:
    line = 'NARROW = ("float32", "bfloat16")'
    mutant = Mutant("K", "a factor", "verify/kernel_levels.py", line, line + REGISTERED.replace("FACTOR", factor))
    result = run_mutant(mutant, ["L0", "L1", "L2", "L6"], Setting("planted"))
    assert result.killed_by.keys() == killers


def test_the_folder_of_a_kernel_says_which_set_it_belongs_to() -> None:
    files = {"kernels/cpu/attention.py": "cpu", "kernels/choose.py": "reference", "ops/linear.py": "reference"}
    assert {file: MUTANTS[0]._replace(file=file).ops for file in files} == files
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
        run_mutants([])


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
