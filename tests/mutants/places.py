"""Where a mutant is planted: found by the syntax tree, so that formatting, renamed variables and moved files do not matter.

A place is a marker comment, `#name` for `# mutant: name` at the end of a line of the statement it marks, or the qualified name
of a function or class below a folder of the package: `ops:attention_backward`, `train:Trainer`; `optim:` is the statements of
the modules themselves. A pattern is Python in which `$x` stands for any expression (the same one wherever it occurs again), and
`*$rest` and `**$rest` in a call for all further arguments (`**$rest` in a dict for all further items). It must match exactly
once: one expression, or some consecutive statements.
Tested by: tests/verify/test_mutants.py."""

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tapeless

PACKAGE = Path(tapeless.__file__).parent
WILD = "wild_"  # what `$` becomes, so that a pattern can be parsed
Found = dict[str, Any]  # what each wildcard stands for: an expression, or a list of arguments


class Match(NamedTuple):
    file: str  # relative to the package
    nodes: list[ast.expr] | list[ast.stmt]
    found: Found


def parsed(pattern: str) -> list[ast.stmt]:
    return ast.parse(textwrap.dedent(pattern.replace("$", WILD))).body


@cache
def files(part: str = "") -> list[str]:
    """The files of a folder of the package, or of the whole."""
    return sorted(str(path.relative_to(PACKAGE)) for path in (PACKAGE / part).rglob("*.py"))


@cache
def tree_of(file: str) -> tuple[str, ast.Module]:
    source = (PACKAGE / file).read_text(encoding="utf-8")
    return source, ast.parse(source)


@cache
def find(place: str, old: str) -> Match:
    """The one match of a pattern at a place."""
    matches = [Match(scope.file, *match) for scope in scopes(place) for match in matches_in(scope, parsed(old))]
    if len(matches) != 1:
        raise ValueError(f"{old!r} matches {len(matches)} times at {place}, not once")
    return matches[0]


def replaced(match: Match, new: str) -> str:
    """The source of the matched file with `new` in place of what was matched."""
    source, _ = tree_of(match.file)
    first, last = match.nodes[0], match.nodes[-1]
    lines = source.encode().splitlines(keepends=True)  # columns of the syntax tree count bytes
    start = sum(map(len, lines[: first.lineno - 1])) + first.col_offset
    assert last.end_lineno is not None
    assert last.end_col_offset is not None
    end = sum(map(len, lines[: last.end_lineno - 1])) + last.end_col_offset
    statements = [ast.unparse(Substituted(match.found).visit(node)) for node in parsed(new)]
    text = "\n".join(statements)
    text = f"({text})" if isinstance(first, ast.expr) else text.replace("\n", "\n" + " " * first.col_offset)
    whole = source.encode()
    return (whole[:start] + text.encode() + whole[end:]).decode()


class Scope(NamedTuple):
    """Where a pattern is searched in a file."""

    file: str
    roots: Sequence[ast.AST]  # trees whose expressions may match
    blocks: list[list[ast.stmt]]  # runs of statements; a pattern of statements matches at the beginning of one


def scopes(place: str) -> Iterator[Scope]:
    if place.startswith("#"):
        yield from marked(place.removeprefix("#"))
        return
    part, _, name = place.partition(":")
    for file in files(part):
        _, tree = tree_of(file)
        own = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
        bodies = [node.body for qualified, node in definitions(tree.body) if qualified == name] if name else [own]
        for body in bodies:
            yield Scope(file, body, [run for block in blocks_in(body) for run in runs(block)])


def definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield f"{prefix}{node.name}", node
            yield from definitions(node.body, f"{prefix}{node.name}.")


def marked(name: str) -> Iterator[Scope]:
    """The statement of each marker comment of this name; of a compound statement the header alone."""
    for file in files():
        source, tree = tree_of(file)
        numbered = enumerate(source.splitlines(), 1) if f"# mutant: {name}" in source else ()
        for number, line in numbered:
            if line.endswith(f"# mutant: {name}"):
                around = [run for block in blocks_in(tree.body) for run in runs(block) if spans(run[0], number)]
                run = max(around, key=lambda run: run[0].lineno)  # the innermost
                yield Scope(file, header(run[0]), [run])


def markers() -> list[str]:
    """Every marker of the package, as often as it occurs."""
    return [name for file in files() for name in re.findall(r"# mutant: ([\w-]+)$", tree_of(file)[0], re.M)]


def runs(block: list[ast.stmt]) -> list[list[ast.stmt]]:
    """Each statement with all that follow it."""
    return [block[i:] for i in range(len(block))]


def spans(statement: ast.stmt, line: int) -> bool:
    return statement.lineno <= line <= (statement.end_lineno or 0)


def matches_in(scope: Scope, pattern: list[ast.stmt]) -> Iterator[tuple[Any, Found]]:
    candidates: list[Any]
    wanted: list[Any]
    if len(pattern) == 1 and isinstance(pattern[0], ast.Expr):
        candidates = [[node] for root in scope.roots for node in ast.walk(root) if isinstance(node, ast.expr)]
        wanted = [pattern[0].value]
    else:
        candidates, wanted = [block[: len(pattern)] for block in scope.blocks], pattern
    for nodes in candidates:
        found: Found = {}
        if same(wanted, nodes, found):
            yield nodes, found


def header(statement: ast.stmt) -> list[ast.AST]:
    """The parts of a statement that are not statements."""
    return [node for node in ast.iter_child_nodes(statement) if not isinstance(node, ast.stmt)]


def blocks_in(body: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    yield body
    for statement in body:
        for field in ("body", "orelse", "finalbody"):
            if isinstance(inner := getattr(statement, field, None), list) and inner:
                yield from blocks_in(inner)


def wildcard(node: Any) -> str | None:
    return node.id if isinstance(node, ast.Name) and node.id.startswith(WILD) else None


def same(pattern: Any, node: Any, found: Found) -> bool:
    """Whether a tree matches a pattern. What wildcards stand for is noted in `found`."""
    if name := wildcard(pattern):
        if name not in found:
            found[name] = node
        return isinstance(node, ast.expr) and same(found[name], node, found)
    if isinstance(pattern, ast.Call) and isinstance(node, ast.Call):
        return same(pattern.func, node.func, found) and same_arguments(pattern, node, found)
    if isinstance(pattern, ast.Dict) and isinstance(node, ast.Dict):
        return same_arguments(as_call(pattern), as_call(node), found)
    if isinstance(pattern, ast.AST):
        fields = [field for field in pattern._fields if field not in ("ctx", "type_comment", "kind")]
        return type(pattern) is type(node) and all(same(getattr(pattern, f), getattr(node, f), found) for f in fields)
    if isinstance(pattern, list):
        return len(pattern) == len(node) and all(same(p, n, found) for p, n in zip(pattern, node, strict=True))
    return bool(pattern == node)


def same_arguments(pattern: ast.Call, node: ast.Call, found: Found) -> bool:
    """Keywords in any order."""
    args, given = list(pattern.args), list(node.args)
    if args and isinstance(args[-1], ast.Starred) and (rest := wildcard(args[-1].value)):
        args.pop()
        found[rest], given = given[len(args) :], given[: len(args)]
    named, open_ended = {k.arg: k.value for k in node.keywords}, None
    for keyword in pattern.keywords:
        if keyword.arg is None:
            open_ended = wildcard(keyword.value)
        elif keyword.arg not in named or not same(keyword.value, named.pop(keyword.arg), found):
            return False
    if open_ended:
        found[open_ended] = [keyword for keyword in node.keywords if keyword.arg in named]
        named = {}
    return not named and same(args, given, found)


def as_call(node: ast.Dict) -> ast.Call:
    """A dict whose keys are texts, as the call that has them for its keywords."""
    names = [str(key.value) if isinstance(key, ast.Constant) else None for key in node.keys]
    return ast.Call(ast.Name("dict"), [], [ast.keyword(n, v) for n, v in zip(names, node.values, strict=True)])


class Substituted(ast.NodeTransformer):
    """A replacement with what its wildcards stand for."""

    def __init__(self, found: Found):
        self.found = found

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self.found[node.id] if wildcard(node) else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        args, keywords = list[ast.expr](), list[ast.keyword]()
        for arg in node.args:
            rest = wildcard(arg.value) if isinstance(arg, ast.Starred) else None
            args += self.found[rest] if rest else [self.visit(arg)]
        for keyword in node.keywords:
            rest = wildcard(keyword.value) if keyword.arg is None else None
            keywords += self.found[rest] if rest else [self.visit(keyword)]
        return ast.Call(self.visit(node.func), args, keywords)

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        items = list[tuple[ast.expr | None, ast.expr]]()
        for key, value in zip(node.keys, node.values, strict=True):
            rest = wildcard(value) if key is None else None
            items += [(ast.Constant(k.arg), k.value) for k in self.found[rest]] if rest else [(key, self.visit(value))]
        return ast.Dict([key for key, _ in items], [value for _, value in items])
