"""The fused output product and loss never holds all logits, and its gradients are those of the two ops apart.

Peak memory is read from torch's own record of every allocation, not from the code under test."""

import torch
from claim import Claims
from torch.profiler import ProfilerActivity, profile

from tapeless.ops.cross_entropy import cross_entropy_backward, cross_entropy_forward
from tapeless.ops.linear import linear_backward, linear_forward
from tapeless.ops.linear_cross_entropy import linear_cross_entropy_backward, linear_cross_entropy_forward
from tapeless.verify.finding import distance
from tapeless.verify.tolerances import OP_FLOAT32

V, N, C = 32000, 2048, 256


def peak_extra(run) -> int:  # type: ignore[no-untyped-def]
    """The most bytes alive at a time of those allocated while `run` ran."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    alive = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


def fused(x, targets, w, dw):  # type: ignore[no-untyped-def]
    loss, saved = linear_cross_entropy_forward(x, targets, w)
    return loss, linear_cross_entropy_backward(1.0, saved, w, dw)


def apart(x, targets, w, dw):  # type: ignore[no-untyped-def]
    logits, linear_saved = linear_forward(x, w, None)
    loss, saved = cross_entropy_forward(logits, targets)
    dlogits = cross_entropy_backward(1.0, saved)
    return loss, linear_backward(dlogits, linear_saved, w, None, dw, None)


generator = torch.Generator().manual_seed(0)
x = torch.randn(N, C, generator=generator)
w = torch.randn(V, C, generator=generator) * 0.1
targets = torch.randint(0, V, (N,), generator=generator)
targets[::7] = -100

claims = Claims("linear_cross_entropy")
results, peaks = {}, {}
for name, op in (("fused", fused), ("apart", apart)):
    dw = torch.zeros_like(w)
    out: list[torch.Tensor] = []
    peaks[name] = peak_extra(lambda op=op, dw=dw, out=out: out.extend(op(x, targets, w, dw)))
    results[name] = {"loss": out[0], "dx": out[1], "dw": dw}
logits_bytes = N * V * 4
for name, peak in peaks.items():
    print(f"{name}: peak {peak / 2**20:.1f} MiB above the inputs; all logits {logits_bytes / 2**20:.1f} MiB")
share = peaks["fused"] / logits_bytes
claims.check(f"V={V} N={N}: peak extra memory, share of the logits", bound=0.125, measured=round(share, 4), ok=share < 0.125)
for tensor, value in results["fused"].items():
    gap = distance(value, results["apart"][tensor])
    claims.check(
        f"{tensor} equal to the ops apart (float32)",
        bound=OP_FLOAT32,
        measured=f"{gap.largest:.1e}",
        ok=gap.largest <= OP_FLOAT32,
    )
claims.finish(peak_bytes=peaks, logits_bytes=logits_bytes)
