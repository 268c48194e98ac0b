"""A product of a block: its matrix, trained or frozen, and the adapters beside it (ops/lora.py).

    y = op(x; w, b), and where there are adapters    y[columns of one] += s (x a') b'
Matrices that one product reads together (q, k and v; gate and up) have an adapter each, which adds to its own columns of y.
Without adapters this is the op itself and nothing more.
Tested by: tests/model/test_adapters.py and levels L2 and L5 (PARTLY_TRAINED_CASES of verify/fixtures.py)."""

from typing import Any, NamedTuple

from torch import Tensor

from tapeless.ops.lora import LORA, LoraSaved
from tapeless.ops.op import Op, handed_back, without


class Adapter(NamedTuple):
    """One adapter, or its gradients."""

    a: Tensor  # (r, I)
    b: Tensor  # (O, r)
    first: int  # where in y its O columns begin


class Product(NamedTuple):
    """What one product takes, or the gradients of it; None: there is none, or it is frozen."""

    w: Tensor | None  # (O, I)
    b: Tensor | None  # (O,)
    adapters: tuple[Adapter, ...] = ()


class ProductSaved(NamedTuple):
    product: Any  # the op's own record
    adapters: tuple[LoraSaved, ...]

    def without(self, name: str) -> "ProductSaved":
        """The input dropped, by its name, so that its memory can go."""
        adapters = tuple(saved._replace(product=without(saved.product, name)) for saved in self.adapters)
        return ProductSaved(without(self.product, name), adapters)

    def handed_back(self, **x: Tensor) -> "ProductSaved":
        """The input put back that `without` had dropped."""
        adapters = tuple(saved._replace(product=handed_back(saved.product, **x)) for saved in self.adapters)
        return ProductSaved(handed_back(self.product, **x), adapters)


def product_forward(op: Op, x: Tensor, p: Product, scale: float) -> tuple[Tensor, ProductSaved]:  # y (..., O)
    y, product = op.forward(x, p.w, p.b)
    adapters = []
    for a, b, first in p.adapters:
        term, saved = LORA.forward(x, a, b, scale=scale, product=op)
        y[..., first : first + len(b)] += term  # y is the op's own and nobody has read it yet
        adapters.append(saved)
    return y, ProductSaved(product, tuple(adapters))


def product_backward(op: Op, dy: Tensor, saved: ProductSaved, p: Product, g: Product, scale: float) -> Tensor:  # dx (..., I)
    dx = op.backward(dy, saved.product, p.w, p.b, g.w, g.b)
    for (a, b, first), of_adapter, (da, db, _) in zip(p.adapters, saved.adapters, g.adapters, strict=True):
        mine = dy[..., first : first + len(b)]  # mutant: lora-columns
        dx += LORA.backward(mine, of_adapter, a, b, da, db, scale=scale, product=op)  # the op's own dx  # mutant: lora-dx
    return dx
