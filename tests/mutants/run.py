"""The checks are checked: each mutant is put into the source, the package imported anew, and every level run against it.

A level that passes on a wrong gradient is a defect of the level. A mutant that one level alone sees hangs on a single thread,
so at least 95 % must be seen by two.
Tested by: tests/verify/test_mutants.py."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from levels import LEVELS, first_failure
from mutants.places import PACKAGE
from mutants.table import Mutant, mutants_of
from tapeless.errors import TapelessError
from tapeless.verify.fixtures import ON_REFERENCE, Setting

IMPORTED_ANEW = (PACKAGE.name, "levels")  # top-level packages
TWO_LEVELS = 0.95  # the share of mutants that at least two levels must kill
TRAINS_FINE = 1.1  # so much of the healthy loss, and nobody who watches it would notice


class _MutantLoader(SourceFileLoader):
    """Compiles the changed source in memory. The bytecode of the healthy module is neither read nor overwritten."""

    def __init__(self, fullname: str, path: str, source: str):
        super().__init__(fullname, path)
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source, self.path, "exec")


class _MutantFinder(MetaPathFinder):
    """Answers for the one module that is changed; all others are found as ever."""

    def __init__(self, mutant: Mutant):
        self.mutant = mutant

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.mutant.module:
            return None
        loader = _MutantLoader(fullname, str(PACKAGE / self.mutant.file), self.mutant.source())
        return spec_from_file_location(fullname, loader.path, loader=loader)


def _loaded() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] in IMPORTED_ANEW}


@contextlib.contextmanager
def _own_numba_cache() -> Iterator[None]:
    """Numba finds compiled code by its file and bytecode, without the constants and the functions that it calls: a mutant would
    be handed the healthy kernel, or leave a mutant behind. Numba reads the variable when it is loaded or told to."""
    name, before = "NUMBA_CACHE_DIR", os.environ.get("NUMBA_CACHE_DIR")

    def reload() -> None:
        if "numba" in sys.modules:
            import_module("numba.core.config").reload_config()

    with tempfile.TemporaryDirectory() as folder:
        os.environ[name] = folder
        reload()
        try:
            yield
        finally:
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before
            reload()


@contextlib.contextmanager
def mutated(mutant: Mutant) -> Iterator[Any]:
    """The levels of a second copy of the package, which has the mutant; the first is back, untouched, afterwards."""
    healthy, finder = _loaded(), _MutantFinder(mutant)
    for name in healthy:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        with _own_numba_cache():
            yield import_module("levels")
    finally:
        sys.meta_path.remove(finder)
        for name in _loaded():
            del sys.modules[name]
        sys.modules.update(healthy)


class MutantResult(NamedTuple):
    number: str
    name: str
    file: str
    killed_by: dict[str, str]  # level -> the first thing it found wrong


def run_mutant(mutant: Mutant, levels: Iterable[str] = tuple(LEVELS), on: Setting | None = None) -> MutantResult:
    """on: what the levels are run with, by default the set that the mutant is planted in."""
    with mutated(mutant) as copy:
        evidence = {level: _evidence(copy, level, on or Setting(mutant.ops)) for level in levels}
    return MutantResult(mutant.number, mutant.name, mutant.file, {level: text for level, text in evidence.items() if text})


def _evidence(copy: Any, level: str, on: Setting) -> str:
    """What a level has against the copy; empty: nothing. An exception convicts too, whatever its kind."""
    try:
        failure = copy.first_failure(level, on)
    except Exception as error:
        return f"{level} raised {type(error).__name__}: {error}"
    return "" if failure is None else str(failure)


def run_mutants(
    only: str | None = None, progress: Callable[[MutantResult], None] | None = None, on: Setting = ON_REFERENCE
) -> list[MutantResult]:
    """Every mutant of a set of ops, or the one of the given number, against all levels. `progress` gets each result as it
    comes.

    A level that already fails on the healthy source would kill everything and prove nothing, so that is an error."""
    for level in LEVELS:
        if (failure := first_failure(level, on)) is not None:
            raise TapelessError(f"the levels must pass before mutants can fail them: {failure}")
    results = []
    for mutant in mutants_of(on.ops):
        if only in (None, mutant.number):
            results.append(run_mutant(mutant, on=on))
            if progress is not None:
                progress(results[-1])
    return results


def survivors(results: Iterable[MutantResult]) -> list[MutantResult]:
    return [result for result in results if not result.killed_by]


def share_killed_twice(results: Sequence[MutantResult]) -> float:
    return sum(len(result.killed_by) >= 2 for result in results) / len(results)


def matrix(results: Sequence[MutantResult], fine: Mapping[str, bool | None]) -> str:
    """Mutant x level as a Markdown table, with the totals beneath. fine: by number, whether a model still trains with it;
    None, or no entry: training does not feel it."""
    lines = [
        f"| mutant | in | {' | '.join(LEVELS)} | levels | trains fine |",
        f"|---|---|{':-:|' * len(LEVELS)}--:|:-:|",
    ]
    words = {True: "yes", False: "no", None: ""}
    for number, name, file, killed_by in results:
        marks = " | ".join("x" if level in killed_by else "" for level in LEVELS)
        lines.append(f"| {number} {name} | `{file}` | {marks} | {len(killed_by)} | {words[fine.get(number)]} |")
    per_level = " | ".join(str(sum(level in result.killed_by for result in results)) for level in LEVELS)
    verdicts = [verdict for result in results if (verdict := fine.get(result.number)) is not None]
    killed = len(results) - len(survivors(results))
    lines.append(f"| in all | | {per_level} | | {sum(verdicts)} |")
    lines += [
        "",
        f"{killed} of {len(results)} killed, {share_killed_twice(results):.0%} by two or more levels.",
        f"**{sum(verdicts)} of {len(verdicts)} mutants still train fine**: the loss ends at most {TRAINS_FINE - 1:.0%} above",
        "that of the correct code, so the loss curve does not reveal them.",
    ]
    return "\n".join(lines) + "\n"
