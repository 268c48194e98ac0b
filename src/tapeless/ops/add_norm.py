"""The residual sum and the norm that reads it, as one op.

    s = x + delta         n = norm(s)
Backward. s is read twice, by the norm and by the next sum (ds), and x and delta receive the same gradient:
    dx = ddelta = ds + dnorm/ds
One tensor is therefore returned for both. delta = None: the first norm of a model, s = x. ds = None: nothing but the norm
reads s (post-norm, and the last norm of a model).
Saved: what the norm saves, whose x is s. Composed of the norms here; kernels do it in one pass.
Tested by: tests/ops/test_add_norm.py."""

from typing import Any, NamedTuple

from torch import Tensor

from tapeless.ops.layer_norm import LAYER_NORM
from tapeless.ops.op import Op
from tapeless.ops.rms_norm import RMS_NORM


class AddNormSaved(NamedTuple):
    norm: Any  # the norm's own record, which holds s (..., C)


def _add_norm(norm: Op) -> Op:
    def forward(
        x: Tensor,  # (..., C)
        delta: Tensor | None,  # (..., C)
        *params: Tensor | None,  # the norm's
        eps: float,
    ) -> tuple[Tensor, Tensor, AddNormSaved]:  # s (..., C), n (..., C)
        s = x if delta is None else x + delta
        n, norm_saved = norm.forward(s, *params, eps=eps)
        return s, n, AddNormSaved(norm_saved)

    def backward(
        ds: Tensor | None,  # (..., C)
        dn: Tensor,  # (..., C)
        saved: AddNormSaved,
        *params_and_dparams: Tensor | None,  # the norm's; gradients accumulated into
    ) -> Tensor:  # dx (..., C), which is ddelta too
        dx = norm.backward(dn, saved.norm, *params_and_dparams)
        return dx if ds is None else dx + ds

    return Op(forward, backward, outputs=("s", "n"))


def norm_of(add_norm: Op) -> Op:
    """The norm alone, by kernels for both."""

    def forward(x: Tensor, *params: Tensor | None, **options: Any) -> tuple[Tensor, Any]:  # y (..., C)
        _, y, saved = add_norm.forward(x, None, *params, **options)
        return y, saved.norm

    def backward(dy: Tensor, saved: Any, *params_and_dparams: Tensor | None) -> Tensor:  # dx (..., C)
        return add_norm.backward(None, dy, AddNormSaved(saved), *params_and_dparams)

    return Op(forward, backward)


ADD_RMS_NORM = _add_norm(RMS_NORM)
ADD_LAYER_NORM = _add_norm(LAYER_NORM)
