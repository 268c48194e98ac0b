"""One test file for each file of ops/, and cases for every op in it."""

from pathlib import Path

import tapeless.ops
from tapeless.ops.op import Op
from tapeless.verify.cases import CASES

OPS = Path(tapeless.ops.__file__).parent
SHARED = {"numerics", "op", "reference"}  # files without an op of their own


def test_every_op_file_has_its_test_file_and_the_other_way_round():
    files = {path.stem for path in OPS.glob("*.py")} - {"__init__"}
    tests = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")} - {"listing"}
    assert tests == files


def test_every_op_is_in_a_case():
    judged = {id(case.op) for case in CASES}
    for path in OPS.glob("*.py"):
        if path.stem not in {"__init__", *SHARED}:
            module = __import__(f"tapeless.ops.{path.stem}", fromlist=["*"])
            named = {name: value for name, value in vars(module).items() if not name.startswith("_")}
            named |= {f"{name}[{kind}]": op for name, ops in named.items() if isinstance(ops, dict) for kind, op in ops.items()}
            ops = {name: value for name, value in named.items() if isinstance(value, Op)}
            assert ops, f"{path.stem} has no op"
            assert {name for name, op in ops.items() if id(op) not in judged} == set()
