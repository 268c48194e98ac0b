"""Muon: orthogonalized momentum for the hidden matrices; AdamW for the rest (embeddings, head, norms, biases).

    m = mu m + (1 - mu) g                 u = m, or with Nesterov mu m + (1 - mu) g once more
    o = orthogonal(u)                     p = p (1 - lr wd) - lr 0.2 max(rows, columns)^(1/2) o
Steepest descent in the spectral norm: with u = U S V' the direction is U V', all singular values 1. orthogonal(u)
approximates it by five Newton-Schulz iterations, which need only matmuls:
    x = a x + (b (x x') + c (x x')^2) x                                                from x = u / |u|, the Frobenius norm
U and V are unchanged, and each singular value s becomes a s + b s^3 + c s^5. The coefficients are those of K. Jordan and
others (2024): steep at 0, and converged values stay between 0.68 and 1.21, which is enough in their experiments. The norm of u
cancels, so m needs no bias correction.
Scale. The root mean square of an orthogonal matrix is max(rows, columns)^(-1/2). The factor makes that of a step 0.2 lr for
every shape, about AdamW's (Liu and others, 2025), so that one lr, one decay and one schedule serve both parts.
Each matrix separately. In the flat buffer wq, wk, wv are adjacent, as are w_gate, w_up, for fused matmuls. But they are
different maps: orthogonalized as one, the three would compete for the same singular directions, and the step would depend on
which matrices a kernel fuses.
In bfloat16 on a CUDA device, else in the dtype of the parameters, float32 or float64. Matrices of one shape are batched.
Tested by: tests/optim/test_muon.py, by singular values and against torch.optim; L4 to L6 as every optimizer."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor

from tapeless.config.fields import check_range
from tapeless.optim.adamw import AdamW, pieces
from tapeless.optim.flat import CapturableOptimizer, decayed_spans, named_views, spans_without

NOT_HIDDEN = ("embed.w", "pos.w", "head.w")  # matrices with one row per token or position
A, B, C, ITERATIONS = 3.4445, -4.7750, 2.0315, 5
SHORTEST = 1e-7  # lower bound of |u|: zero gradients give a zero step
STEP = 0.2  # root mean square of a step, in units of lr
TOGETHER = 2**24  # elements per batch: enough to fill a GPU, few compared with a large model


def orthogonal(
    u: Tensor,  # (k, rows, columns)
) -> Tensor:  # (k, rows, columns)
    """Approximate orthogonal factor of each matrix: singular values between 0.68 and 1.21, except those below 0.002 |u|."""
    x = u.mT if u.shape[-2] > u.shape[-1] else u  # the smaller side first: the size of x x'
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(SHORTEST)
    for _ in range(ITERATIONS):
        xx = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(xx, xx, xx, beta=B, alpha=C), x, beta=A)
    return x.mT if u.shape[-2] > u.shape[-1] else x


def matmul_dtype(p: Tensor) -> torch.dtype:
    return torch.bfloat16 if p.dtype == torch.float32 and p.device.type == "cuda" else p.dtype


def batches(matrices: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names of matrices of one shape, up to TOGETHER elements."""
    shapes: dict[torch.Size, list[str]] = {}
    for name, w in matrices.items():
        shapes.setdefault(w.shape, []).append(name)
    for shape, names in shapes.items():
        k = max(1, TOGETHER // shape.numel())
        yield from (names[i : i + k] for i in range(0, len(names), k))


class Muon(AdamW):
    __doc__ = __doc__

    options = (*AdamW.options, "momentum", "nesterov")

    def __init__(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        *,
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = True,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        decay: Collection[str] | None = None,
        fused: Callable[..., None] | None = None,
    ):
        """As AdamW, whose betas and eps are for all but the hidden matrices; lr and weight_decay are for both. momentum: the
        decay of the matrices' one moment. nesterov: look one step ahead along it."""
        adamw = {"beta1": beta1, "beta2": beta2, "eps": eps}
        super().__init__(params, grads, lr=lr, weight_decay=weight_decay, decay=decay, fused=fused, **adamw)
        check_range("momentum", momentum, ge=0, lt=1)
        self.one_kernel = False  # the kernel updates the rest alone
        params = self._views  # of what trains
        self.momentum, self.nesterov = momentum, nesterov
        self._matrices = {name: w for name, w in params.items() if w.dim() == 2 and name not in NOT_HIDDEN}
        self._batches = list(batches(self._matrices))
        self._momenta = named_views(self.state["exp_avg"], self._matrices)
        self._rest = spans_without(params, len(self.params), self._matrices)
        self._decayed_spans = decayed_spans(params, self.decay - set(self._matrices)) if self.weight_decay else []
        self._pieces = pieces(self._decayed_spans, self._rest).to(self.params.device)

    def _step(self, scale: float, copy: Tensor | None) -> bool:
        return CapturableOptimizer._step(self, scale, copy)

    def update_on_device(self, step_scalars: Tensor, scale: Tensor, copy: Tensor | None) -> None:
        CapturableOptimizer.update_on_device(self, step_scalars, scale, copy)

    def _step_scalars(self, t: int) -> list[float]:
        """Those of AdamW, then 1 - mu, then the rate of each batch."""
        shapes = [self._matrices[names[0]].shape for names in self._batches]
        rates = [-self.lr * STEP * math.sqrt(max(shape)) for shape in shapes]
        return [*super()._step_scalars(t), 1 - self.momentum, *rates]

    def _identity_scalars(self) -> list[float]:
        return [*super()._identity_scalars(), 0.0, *(0.0 for _ in self._batches)]

    def _apply(self, g: Tensor, step_scalars: Tensor) -> None:
        shrink, rest, gradients = step_scalars[0], step_scalars[8], named_views(g, self._matrices)
        for names, rate in zip(self._batches, step_scalars[9:], strict=True):
            self._turn({name: gradients[name] for name in names}, shrink, rest, rate)
        if self.fused is not None:
            self._fused_update(g, step_scalars, torch.ones((), device=g.device), None)
        else:
            self._shrink(shrink)
            for span in self._rest:
                self._move(g, span, step_scalars)

    def _turn(self, gradients: Mapping[str, Tensor], shrink: Tensor, rest: Tensor, rate: Tensor) -> None:
        """One step of a batch of matrices of one shape."""
        directions = torch.stack([self._direction(name, g, rest) for name, g in gradients.items()])
        o = orthogonal(directions.to(matmul_dtype(directions))).to(directions.dtype)  # (k, rows, columns)
        for name, each in zip(gradients, o, strict=True):
            w = self._matrices[name]
            if name in self.decay:
                w *= shrink
            w.addcmul_(each, rate)

    def _direction(self, name: str, g: Tensor, rest: Tensor) -> Tensor:  # (rows, columns)
        m = self._momenta[name]
        m.lerp_(g, rest)
        return m.lerp(g, rest) if self.nesterov else m

    def named_state(self) -> dict[str, dict[str, Tensor]]:
        """The momentum of a matrix is stored in place of AdamW's first moment; matrices have no second moment."""
        moments = super().named_state()
        rest = {key: {name: x for name, x in views.items() if name not in self._matrices} for key, views in moments.items()}
        groups = {"momentum": dict(self._momenta), **rest}
        return {key: views for key, views in groups.items() if views}  # a checkpoint cannot hold an empty group
