"""The ops of a kernel set, each by itself. A kernel computes in float32 and bfloat16 only, where neither a complex step nor
a difference quotient means anything, so it is compared with the float64 formula that the reference op equals:

    L0   the adjoint test in float32
    L1   float32 at the fixture's sizes, at one position and at odd sizes; bfloat16 by its own bound, and by the reference op's
         error in bfloat16: at most a small multiple of it; and the promises of ops/op.py in both
Tested by: tests/verify/test_kernel_levels.py."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from tapeless.verify.cases import CASES, OpCase
from tapeless.verify.finding import Finding, distance
from tapeless.verify.op_fixtures import Shape
from tapeless.verify.op_levels import adjoint_findings, against_float64, in_narrow
from tapeless.verify.promises import promises
from tapeless.verify.tolerances import KERNEL_BACKWARD, KERNEL_FORWARD, OP_BFLOAT16, OP_FLOAT32

REFERENCE = {case.name: case.op for case in CASES}
# Kernels take other branches for other sizes, and go wrong at the borders of their blocks. Between these: one position, two,
# few, and one more than a block; head widths that are powers of two and one that is not; one row and several; shared heads in
# every way; sizes that no block divides.
SHAPES = (
    Shape(B=1, T=1, H=1, G=1, D=8, C=24, F=43, V=17),
    Shape(B=3, T=2, H=6, G=3, D=20, C=100, F=256, V=1000),
    Shape(B=1, T=7, H=4, G=4, D=128, C=256, F=100, V=17),
    Shape(B=3, T=33, H=4, G=1, D=32, C=24, F=43, V=1000),
    Shape(B=1, T=65, H=8, G=2, D=64, C=256, F=129, V=17),
    Shape(B=3, T=130, H=3, G=3, D=20, C=100, F=43, V=1000),
)
MANY_ROWS = Shape(B=3, T=700, C=24, V=1000)  # two million logits: more than a block of the reference op
ONE_LENGTH = "attention[long]"  # a case of its own length
SEEDS = 3  # of the inputs: for one seed the reference's error may be small by chance


def kernel_level_0(cases: Iterable[OpCase]) -> Iterator[Finding]:
    for case in cases:
        yield from adjoint_findings(case, ["float32"])


def kernel_level_1(cases: Iterable[OpCase], dtypes: Iterable[str]) -> Iterator[Finding]:
    for case in cases:
        for dtype in dtypes:
            yield from promises(case, dtype)
        yield from in_narrow(case, dtypes)
        yield from at_one_position(case)
        yield from at_other_sizes(case)
        if "bfloat16" in dtypes:
            yield from beside_the_reference(case)


def at_one_position(case: OpCase) -> Iterator[Finding]:
    yield from _in_float32(case.at(T=1), "float32, T=1")


def at_odd_shapes(case: OpCase) -> Iterator[OpCase]:
    if case.name != ONE_LENGTH:
        yield from (case.at(**shape._asdict()) for shape in SHAPES)
    if case.family == "linear_cross_entropy":
        yield case.at(**MANY_ROWS._asdict())


def at_other_sizes(case: OpCase) -> Iterator[Finding]:
    for other in at_odd_shapes(case):
        sizes = " ".join(f"{letter}={size}" for letter, size in other.shape._asdict().items())
        yield from _in_float32(other, f"float32, {sizes}")


def _in_float32(case: OpCase, oracle: str) -> Iterator[Finding]:
    for name, (claimed, truth) in against_float64(case, torch.float32).items():
        if not case.is_zero(name):
            gap = distance(claimed, truth)
            yield Finding("L1", case.name, oracle, name, gap.largest, OP_FLOAT32, gap.where)


def beside_the_reference(case: OpCase) -> Iterator[Finding]:
    """bfloat16. A result in float32 may always have float32's error, and one in bfloat16 one rounding, however small the
    reference's error is."""
    plain = replace(case, op=REFERENCE[case.name])
    theirs = [against_float64(plain, torch.bfloat16, seed) for seed in range(SEEDS)]
    for seed in range(SEEDS):
        for name, (claimed, truth) in against_float64(case, torch.bfloat16, seed).items():
            gap = distance(claimed, truth)
            factor = KERNEL_FORWARD if name in case.outputs else KERNEL_BACKWARD
            worst = max(distance(*found[name]).largest for found in theirs)
            allowed = max(factor * worst, torch.finfo(claimed.dtype).eps, OP_FLOAT32)
            yield Finding("L1", case.name, "bfloat16", name, gap.largest, OP_BFLOAT16, gap.where)
            yield Finding("L1", case.name, "bfloat16 of the reference", name, gap.largest, allowed, gap.where)
