"""The fused output product and loss never holds all logits, and its gradients are those of the two ops apart.

Peak memory is read from torch's own record of every allocation, not from the code under test."""

import torch
from claim import Claims
from torch.profiler import ProfilerActivity, profile

from tapeless.ops.cross_entropy import cross_entropy_backward, cross_entropy_forward
from tapeless.ops.linear import linear_backward, linear_forward
from tapeless.ops.linear_cross_entropy import linear_cross_entropy_backward, linear_cross_entropy_forward
from tapeless.verify.finding import distance
from tapeless.verify.tolerances import OP_BFLOAT16, OP_FLOAT32

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


def measured(op, x, targets, w):  # type: ignore[no-untyped-def]
    """Its peak, and its loss and gradients."""
    dw = torch.zeros(w.shape)  # float32, as a model's gradients are
    out: list[torch.Tensor] = []
    peak = peak_extra(lambda: out.extend(op(x, targets, w, dw)))
    return peak, {"loss": out[0], "dx": out[1], "dw": dw}


generator = torch.Generator().manual_seed(0)
x = torch.randn(N, C, generator=generator)
w = torch.randn(V, C, generator=generator) * 0.1
targets = torch.randint(0, V, (N,), generator=generator)
targets[::7] = -100

claims = Claims("linear_cross_entropy")
peaks, logits_bytes = {}, {}
for dtype in (torch.float32, torch.bfloat16):
    name = str(dtype).removeprefix("torch.")
    peaks[name], logits_bytes[name] = {}, N * V * dtype.itemsize
    peaks[name]["fused"], together = measured(fused, x.to(dtype), targets, w.to(dtype))
    peaks[name]["apart"], separate = measured(apart, x.to(dtype), targets, w.to(dtype))
    shares = {kind: round(peak / logits_bytes[name], 4) for kind, peak in peaks[name].items()}
    claims.check(
        f"V={V} N={N} {name}: peak extra memory of the ops apart, share of the logits (the measure sees them)",
        bound="at least 1",
        measured=shares["apart"],
        ok=shares["apart"] >= 1,
    )
    claims.check(
        f"V={V} N={N} {name}: peak extra memory of the fused op, share of the logits",
        bound=0.125,
        measured=shares["fused"],
        ok=shares["fused"] < 0.125,
    )
    for tensor, value in together.items():
        gap, bound = distance(value, separate[tensor]).l2, {"float32": OP_FLOAT32, "bfloat16": OP_BFLOAT16}[name]
        claims.check(f"{name}: {tensor} equal to the ops apart", bound=bound, measured=f"{gap:.1e}", ok=gap <= bound)
claims.finish(peak_bytes=peaks, logits_bytes=logits_bytes)
