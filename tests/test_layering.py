"""Rules about the source, checked by reading it: imports go one way, no autograd on the training path, ops have backwards."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "tapeless"

# What each part of the package may import: config <- ops <- kernels <- model <- interop <- training <- estimate <- runner <-
# cli; ops <- generate <- model; config <- data, optim; report and tasks read what training writes; verify may import all up to
# training, and bench also verify and estimate.
BELOW: dict[str, set[str]] = {name: set() for name in ("start", "text", "progress", "errors", "regular")}
BELOW["config"] = {"errors", "regular"}
BELOW["output"] = {"errors"}
BELOW["ops"] = BELOW["config"] | {"config"}
BELOW["data"] = BELOW["optim"] = BELOW["ops"]
BELOW["dist"] = BELOW["ops"] | {"start", "output"}
BELOW["generate"] = BELOW["ops"] | {"ops"}
BELOW["kernels"] = BELOW["ops"] | {"ops", "progress"}
BELOW["model"] = BELOW["kernels"] | {"kernels", "generate"}
BELOW["interop"] = BELOW["model"] | {"model", "data", "optim"}
BELOW["plugins"] = BELOW["model"] | {"model"}
BELOW["training"] = BELOW["interop"] | {
    "interop",
    "plugins",
    "text",
    "output",
    "dist",
}  # samples are drawn; a run may start from imports
BELOW["verify"] = BELOW["training"] | {"training"}
BELOW["estimate"] = BELOW["verify"] | {"verify", "dist"}
BELOW["bench"] = BELOW["estimate"] | {"estimate", "start"}
BELOW["report"] = BELOW["tasks"] = BELOW["training"] | {"training"}
BELOW["runner"] = BELOW["report"] | {"report", "verify", "estimate", "output"}
BELOW["cli"] = BELOW["bench"] | {"bench", "report", "tasks", "runner"}
BELOW["__main__"] = {"cli"}

BARE = ("ops", "kernels", "model", "optim", "verify", "bench")  # importable with torch and numpy alone
TAPELESS = ("ops", "kernels", "model", "optim", "training")  # the training path


def sources(*parts: str) -> list[Path]:
    return sorted(path for part in parts for path in (SRC / part).rglob("*.py"))


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def part_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> list[str]:
    """Dotted names of everything imported, at any depth. `from a import b` counts as a.b."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write the full name"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def forbidden_imports(part: str, source: str) -> list[str]:
    """Imports of tapeless that a file of `part` may not have. Only cli may import the root package (version, lazy names)."""
    wrong = []
    for name in imported(ast.parse(source)):
        top, _, rest = name.partition(".")
        if top != "tapeless":
            continue
        target = rest.split(".")[0]
        if target != part and target not in BELOW[part] and not (part == "cli" and not rest):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("path", [p for p in sources(".") if p != SRC / "__init__.py"], ids=ids)
def test_imports_go_one_way(path: Path):
    assert part_of(path) in BELOW, f"{part_of(path)} is not in BELOW"
    assert forbidden_imports(part_of(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("errors", "from tapeless.config import ModelConfig"),
        ("config", "import tapeless.ops.op"),
        ("ops", "from tapeless.model.block import block_forward"),
        ("ops", "def f():\n    from tapeless.kernels.choose import choose"),
        ("kernels", "from tapeless.model import params"),
        ("model", "import tapeless.verify.oracles"),
        ("optim", "from tapeless.ops.op import Op"),
        ("verify", "from tapeless.cli.main import main"),
        ("model", "from tapeless import Transformer"),
        ("model", "import tapeless"),
    ],
)
def test_a_wrong_import_is_found(part: str, source: str):
    assert forbidden_imports(part, source)


def test_the_root_package_imports_nothing_of_its_own_at_run_time():
    tree = ast.parse((SRC / "__init__.py").read_text())
    typing_only = {id(node) for branch in tree.body if isinstance(branch, ast.If) for node in ast.walk(branch)}
    run_time = ast.Module([node for node in tree.body if id(node) not in typing_only], [])
    assert all(name.split(".")[0] in sys.stdlib_module_names for name in imported(run_time))


def module_level(tree: ast.Module) -> ast.Module:
    """The tree without the bodies of functions: what runs when the file is imported."""

    class Bodiless(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
            node.body = [ast.Pass()]
            return node

    return Bodiless().visit(tree)


@pytest.mark.parametrize("path", sources(*BARE), ids=ids)
def test_only_torch_and_numpy_are_imported(path: Path):
    everywhere = {name.split(".")[0] for name in imported(ast.parse(path.read_text()))}
    at_once = {name.split(".")[0] for name in imported(module_level(ast.parse(path.read_text())))}
    known = sys.stdlib_module_names | {"torch", "numpy", "tapeless"}
    if path.is_relative_to(SRC / "kernels" / "cpu"):  # imported by kernels/choose.py alone, which reports a failure
        known |= {"numba", "llvmlite"}
    if path.is_relative_to(SRC / "kernels" / "triton"):  # likewise
        known |= {"triton"}
    lazily = {"kernels": {"triton", "numba"}, "verify": {"transformers"}, "bench": {"transformers"}}.get(part_of(path), set())
    assert at_once <= known
    assert everywhere <= known | lazily


IMPORT_ALL = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        hidden = {"transformers", "tokenizers", "safetensors", "numba", "llvmlite", "triton", "pytest", "rich"}
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"{name} is hidden", name=name)

sys.meta_path.insert(0, Absent())
count = 0
for part in sys.argv[1:]:
    package = importlib.import_module(f"tapeless.{part}")
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.startswith(("tapeless.kernels.cpu", "tapeless.kernels.triton")):
            importlib.import_module(module.name)
            count += 1
print(count)
"""


def test_the_core_is_importable_without_optional_packages():
    parts = [part for part in BARE if (SRC / part).is_dir()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", IMPORT_ALL, *parts], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    hidden = [SRC / "kernels" / name for name in ("cpu", "triton")]
    there = [p for p in sources(*parts) if p.name != "__init__.py" and not any(map(p.is_relative_to, hidden))]
    assert int(run.stdout) == len(there)


TAPE = ("torch.autograd", "torch.func", "torch.optim", "torch.compile", "torch.jit", "torch._dynamo", "torch.enable_grad")
MODULES = ("torch.nn.Module", "torch.nn.Parameter", "torch.nn.modules", "torch.nn.parameter", "torch.nn.init")
TAPE_ATTRIBUTES = {"requires_grad", "requires_grad_", "grad_fn", "grad", "retain_grad", "autograd"}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def autograd_uses(source: str) -> list[str]:
    """Names of torch's autograd, modules, optimizers and compiler, under whatever alias they were imported."""
    tree = ast.parse(source)
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {a.asname: a.name for a in node.names if a.asname}
        elif isinstance(node, ast.ImportFrom):
            aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    used = imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, _, rest = dotted(node).partition(".")
            used.append(f"{aliases.get(head, head)}.{rest}")
            if node.attr in TAPE_ATTRIBUTES:
                used.append(f"torch.autograd by .{node.attr}")
        elif isinstance(node, ast.keyword) and node.arg == "requires_grad":
            used.append("torch.autograd by requires_grad=")
    return [name for name in used if name.startswith(TAPE + MODULES)]


@pytest.mark.parametrize("path", sources(*TAPELESS), ids=ids)
def test_no_autograd_on_the_training_path(path: Path):
    assert autograd_uses(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch.autograd",
        "from torch.autograd import Function",
        "import torch\nx = torch.ones(1, requires_grad=True)",
        "x.requires_grad_()",
        "dw = w.grad",
        "from torch import nn\nclass A(nn.Module): pass",
        "import torch.nn as layers\nw = layers.Parameter(x)",
        "import torch as t\nstep = t.compile(step)",
        "from torch.optim import AdamW",
        "import torch\ntorch.func.vjp(f, x)",
    ],
)
def test_autograd_is_found(source: str):
    assert autograd_uses(source)


def test_attention_primitives_are_not_autograd():
    assert not autograd_uses("from torch.nn.functional import scaled_dot_product_attention")


SCRIPTS = sorted((ROOT / "acceptance").glob("*.py"))
SCRIPT_PATH = [ROOT / "acceptance", ROOT / "tests" / "faults", ROOT / "tests" / "train"]  # as acceptance/harness.py sets it


@pytest.mark.parametrize("path", SCRIPTS, ids=ids)
def test_an_acceptance_script_finds_what_it_imports(path: Path):
    """The scripts run rarely and for hours; a helper of theirs and one of the tests must not share a name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        files = [folder / f"{node.module}.py" for folder in SCRIPT_PATH if (folder / f"{node.module}.py").is_file()]
        if files:
            assert {alias.name for alias in node.names} <= defined(files[0]), f"{node.module} is {ids(files[0])}"


def defined(path: Path) -> set[str]:
    """The names that can be imported from a module."""
    tree = ast.parse(path.read_text())
    names = {name.rpartition(".")[2] for name in imported(tree)}
    names |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return names | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


NOT_OPS = {"__init__", "op", "numerics", "reference"}  # the contract, shared conventions, and the op set
OP_FILES = [path for path in sources("ops") if path.stem not in NOT_OPS]


@pytest.mark.parametrize("path", OP_FILES, ids=ids)
def test_an_op_file_documents_its_backward(path: Path):
    """The docstring names what is saved and the test; every forward is followed by its backward."""
    tree = ast.parse(path.read_text())
    text = ast.get_docstring(tree) or ""
    assert "Saved:" in text or "nothing is saved" in text
    assert f"Tested by: tests/ops/test_{path.stem}.py." in text
    assert len(text.splitlines()) <= 25
    scopes = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]  # a factory makes ops inside
    functions = [node.name for scope in scopes for node in scope.body if isinstance(node, ast.FunctionDef)]
    forwards = [name for name in functions if name.endswith("forward")]
    assert forwards
    for name in forwards:
        assert functions[functions.index(name) + 1] == name.removesuffix("forward") + "backward"
