"""Sizes for kernels: they take other branches for other sizes, and go wrong at the borders of their blocks.

Between them: one position, two, few, and one more than a block; head widths that are powers of two and one that is not; one
row and several; shared heads in every way; sizes that no block divides."""

from collections.abc import Iterator

from tapeless.verify.cases import OpCase
from tapeless.verify.op_fixtures import Shape

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


def at_odd_shapes(case: OpCase) -> Iterator[OpCase]:
    if case.name != ONE_LENGTH:
        yield from (case.at(**shape._asdict()) for shape in SHAPES)
    if case.family == "linear_cross_entropy":
        yield case.at(**MANY_ROWS._asdict())
