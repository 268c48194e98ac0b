"""L6, metamorphic checks: what must not change when something irrelevant changes, and what is zero by identity.

No oracle and no step size is needed: the model is compared with itself, bit for bit where the arithmetic is the same."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tapeless.config import ModelConfig
from tapeless.model.chain import Chain, layer
from tapeless.model.transformer import Transformer
from tapeless.ops.cross_entropy import CROSS_ENTROPY
from tapeless.ops.dropout import DROPOUT, dropout_key
from tapeless.ops.embed import EMBED
from tapeless.ops.layer_norm import LAYER_NORM
from tapeless.ops.linear import LINEAR
from tapeless.ops.op import OpSet
from tapeless.ops.rms_norm import RMS_NORM
from tapeless.ops.rope import ROPE
from tapeless.verify.finding import Finding, distance
from tapeless.verify.fixtures import (
    FIRST_SAMPLE,
    SEED,
    STEP,
    B,
    Batch,
    ModelCase,
    T,
    V,
    batch,
    build,
    data_of,
    gradients,
    zero_by_identity,
)
from tapeless.verify.model_judges import largest_gap, rounding_floor
from tapeless.verify.oracles import norm
from tapeless.verify.tolerances import METAMORPHIC

EPS = 1e-30  # of a norm: so small that the scale does not matter


def check_metamorphic(case: ModelCase, dtype: str = "float64") -> Iterator[Finding]:
    """All checks of one architecture. Dropout is on only for the silent blocks, since its mask depends on the position."""
    assert isinstance(case.config, ModelConfig)
    yield from silent_blocks(case, case.config, dtype)
    case = case._replace(config=replace(case.config, dropout=0.0))
    model = build(case, dtype)
    assert isinstance(model, Transformer)
    data, check = data_of(case), name_of(case, dtype)
    yield from the_past_is_blind(model, check)
    yield from documents_are_apart(model, check)
    yield from decoding(model, check)
    yield from batch_order(model, data, check)
    yield from padding(model, check)
    yield from one_loss(model, data, check)
    yield from zeros(model, data, check)


def name_of(case: ModelCase, dtype: str) -> str:
    return f"model[{case.name}]" if dtype == "float64" else f"model[{case.name}, {dtype}]"


def plain_batch(model: Transformer, T: int = T) -> Batch:
    return Batch(*batch(T=T)).to(model.device)


def equal(check: str, what: str, tensor: str, a: Tensor, b: Tensor, bound: float = 0.0) -> Finding:
    """By default bit for bit."""
    gap = distance(a, b)
    return Finding("L6", check, what, tensor, gap.largest, bound, gap.where)


def equal_gradients(model: Transformer, check: str, what: str, a: dict[str, Tensor], b: dict[str, Tensor]) -> Finding:
    """All but those that are zero by identity."""
    skip = zero_by_identity(model.config, T)
    return largest_gap("L6", check, what, a, {name: g for name, g in b.items() if name not in skip}, METAMORPHIC[model.dtype])


def changed(tokens: Tensor) -> Tensor:
    return (tokens + 1) % V


def the_past_is_blind(model: Transformer, check: str) -> Iterator[Finding]:
    """Other tokens from position 4 on: logits before it are equal bit for bit, and those after it are not."""
    tokens = plain_batch(model).tokens
    other = tokens.clone()
    other[:, 4:] = changed(other[:, 4:])
    a, b = model.logits(tokens), model.logits(other)
    yield equal(check, "causality", "logits", b[:, :4], a[:, :4])
    moved = bool((a[:, 4:] != b[:, 4:]).any())
    yield Finding("L6", check, "causality", "logits that must move", 0.0 if moved else 1.0, 0.0)


def documents_are_apart(model: Transformer, check: str) -> Iterator[Finding]:
    """Two documents in one row equal two rows (not with learned positions; rotation is relative). And the second document does
    not depend on the first, bit for bit."""
    tokens, cut = plain_batch(model).tokens, 3
    ids = (torch.arange(T, device=model.device) >= cut).long().expand(B, -1)
    packed = model.logits(tokens, documents=ids)
    if model.config.position != "learned":
        apart = torch.cat([model.logits(tokens[:, :cut].contiguous()), model.logits(tokens[:, cut:].contiguous())], 1)
        yield equal(check, "documents apart", "logits", packed, apart, METAMORPHIC[model.dtype])
    other = tokens.clone()
    other[:, :cut] = changed(other[:, :cut])
    yield equal(check, "documents apart", "second document", model.logits(other, documents=ids)[:, cut:], packed[:, cut:])


def decoding(model: Transformer, check: str) -> Iterator[Finding]:
    """In chunks with a kv_cache, and token by token: then the sequences are of different lengths, in other slots."""
    tokens = plain_batch(model).tokens
    full, kv_cache = model.logits(tokens), model.kv_cache(B, T)
    parts = [model.logits(part, kv_cache=kv_cache) for part in tokens.split([3, 1, T - 4], 1)]
    yield equal(check, "kv_cache in chunks", "logits", torch.cat(parts, 1), full, METAMORPHIC[model.dtype])
    found, kv_cache = torch.empty_like(full), model.kv_cache(B, T)
    for step in range(T + B - 1):
        rows = torch.arange(max(0, step - T + 1), min(B, step + 1), device=model.device)  # row i begins at step i
        found[rows, step - rows] = model.decode(tokens[rows, step - rows], B - 1 - rows, step - rows, kv_cache)
    yield equal(check, "kv_cache one by one", "logits", found, full, METAMORPHIC[model.dtype])


def batch_order(model: Transformer, data: Batch, check: str) -> Iterator[Finding]:
    order = (2, 0, 1)
    a, b = gradients(model, data), gradients(model, data.samples(*order))
    yield equal_gradients(model, check, "batch order", b, a)
    expected = model.logits(data.tokens)[list(order)]
    yield equal(check, "batch order", "logits", model.logits(data.tokens[list(order)]), expected, METAMORPHIC[model.dtype])


def padding(model: Transformer, check: str) -> Iterator[Finding]:
    """Two more positions whose targets are ignored change neither the loss nor a gradient."""
    short = plain_batch(model)
    ignored = torch.full_like(short.targets[:, :2], -100)
    longer = Batch(torch.cat([short.tokens, short.tokens[:, :2]], 1), torch.cat([short.targets, ignored], 1))
    a, b = gradients(model, short), gradients(model, longer)
    yield equal_gradients(model, check, "padding", b, a)
    padded, plain = (model.loss(data.tokens, data.targets) for data in (longer, short))
    yield equal(check, "padding", "loss", padded, plain, METAMORPHIC[model.dtype])


def one_loss(model: Transformer, data: Batch, check: str) -> Iterator[Finding]:
    """Three ways to the same loss and gradients: forward, loss, and logits with an upstream gradient."""
    c, (tokens, targets, documents) = model.config, data
    direct = gradients(model, data)
    evaluated, trained = model.loss(*data[:2], documents=documents), model.forward(tokens, targets, documents=documents)
    yield equal(check, "loss() is forward()", "loss", evaluated, trained)
    model.zero_grads()
    logits = model.logits(tokens, keep=True, documents=documents)
    penalties = {"label_smoothing": c.label_smoothing, "z_loss": c.z_loss}
    loss, saved = CROSS_ENTROPY.forward(logits, targets, **penalties)
    dlogits = CROSS_ENTROPY.backward(1.0, saved, **penalties)
    model.backward(dlogits)
    yield equal(check, "logits, then cross-entropy", "loss", loss, trained, METAMORPHIC[model.dtype])
    yield equal_gradients(model, check, "backward(dlogits)", dict(model.grads), direct)
    if not c.z_loss:
        sums = float((dlogits.sum(-1) / dlogits.norm()).abs().max())
        yield Finding("L6", check, "dlogits sum to 0 over V", "dlogits", sums, METAMORPHIC[model.dtype])
    ignored = dlogits[targets == -100]
    yield equal(check, "ignored targets", "dlogits", ignored, torch.zeros_like(ignored))


def zeros(model: Transformer, data: Batch, check: str) -> Iterator[Finding]:
    """Gradients that nothing reaches are exactly 0; those that cancel are 0 up to rounding."""
    grads = gradients(model, data)
    unused = torch.ones(V, dtype=torch.bool, device=model.device)
    unused[data.tokens] = False
    untouched = {} if model.config.tie_embeddings else {"embed.w": grads["embed.w"][unused]}
    if "pos.w" in grads:
        untouched["pos.w"] = grads["pos.w"][T:]
    for name, g in untouched.items():
        yield Finding("L6", check, "unused rows", name, float(g.abs().max()), 0.0)
    alone, floor = gradients(model, plain_batch(model, T=1)), rounding_floor(model.dtype)
    for name in sorted(zero_by_identity(model.config, 1) & alone.keys()):
        yield Finding("L6", check, "T = 1", name, norm({name: alone[name]}) / norm(alone), floor)


def silent_blocks(case: ModelCase, config: ModelConfig, dtype: str) -> Iterator[Finding]:
    """Blocks whose sublayers output 0 are the identity (a norm of a norm is a norm). The rest is a Chain of embedding, dropout,
    norm and head, whose gradients the residual stream must carry back. The Chain always runs the reference ops in float64."""
    c, C = replace(config, norm_eps=EPS), config.hidden_dim
    model, data = build(case._replace(config=c), dtype), data_of(case.on_reference)
    assert isinstance(model, Transformer)
    for name, w in model.params.items():
        if name.endswith((".wo", ".bo", ".w_down", ".b_down", "pos.w")):
            w.zero_()
        elif name.startswith("blocks.") and name.endswith(("_norm.w", "_norm.b")):
            w.fill_(1.0 if name.endswith("w") else 0.0)
    norms = {
        "rms": layer("final_norm", RMS_NORM, w=(C,), eps=EPS),
        "layer": layer("final_norm", LAYER_NORM, w=(C,), b=(C,) if c.norm_bias else None, eps=EPS),
    }
    chain = Chain(
        layer("embed", EMBED, w=(V, C)),
        layer("dropout", DROPOUT, p=c.dropout, key=dropout_key(SEED, STEP, "embed"), first_sample=FIRST_SAMPLE),
        norms[c.norm],
        layer("head", LINEAR, w=(V, C), b=None),
        dtype="float64",
    )
    for name, w in chain.params.items():
        w.copy_(model.params["embed.w" if name == "head.w" and c.tie_embeddings else name])
    options = {"label_smoothing": c.label_smoothing, "z_loss": c.z_loss, "softcap": c.logit_softcap}
    _, saved = CROSS_ENTROPY.forward(chain.forward(data.tokens), data.targets, **options)
    chain.backward(CROSS_ENTROPY.backward(1.0, saved, **options))
    truth = dict(chain.grads)
    if c.tie_embeddings:
        truth["embed.w"] = truth["embed.w"] + truth.pop("head.w")
    claimed = gradients(model, data_of(case))
    yield largest_gap("L6", name_of(case, dtype), "silent blocks", claimed, truth, METAMORPHIC[model.dtype])


def sums_are_wide(ops: OpSet, device: str = "cpu") -> Iterator[Finding]:
    """In bfloat16 a parameter's gradient is summed over the rows in float32: half of the rows and then the other half give
    what all of them give, but for the last bits of float32."""
    generator = torch.Generator().manual_seed(0)
    x, dy, square = (torch.randn(n, 6, generator=generator).bfloat16().to(device) for n in (64, 64, 6))
    w, b, rms, centred = square[0], square[1], ops.norm["rms"], ops.norm["layer"]

    def linear(rows: slice, dw: Tensor, db: Tensor) -> None:
        ops.linear.backward(dy[rows], ops.linear.forward(x[rows], square, b)[1], square, b, None, db)

    def rms_norm(rows: slice, dw: Tensor, db: Tensor) -> None:
        rms.backward(dy[rows], rms.forward(x[rows], w, eps=EPS)[1], w, dw)

    def layer_norm(rows: slice, dw: Tensor, db: Tensor) -> None:
        centred.backward(dy[rows], centred.forward(x[rows], w, b, eps=EPS)[1], w, b, dw, db)

    for name, backward in (("linear", linear), ("rms_norm", rms_norm), ("layer_norm", layer_norm)):
        whole, halves = torch.zeros(2, 6, device=device), torch.zeros(2, 6, device=device)
        backward(slice(0, 64), *whole)
        backward(slice(0, 32), *halves)
        backward(slice(32, 64), *halves)
        yield equal(f"{name}[bfloat16]", "rows in halves", "dw, db", halves, whole, METAMORPHIC["float32"])


def op_identities() -> Iterator[Finding]:
    """A norm does not depend on its input's scale, nor LayerNorm on a shift, so dx is orthogonal to both; a rotation preserves
    lengths, and so does its transpose."""
    generator, bound = torch.Generator().manual_seed(0), METAMORPHIC["float64"]
    x, dy, w, b = (torch.randn(n, 6, generator=generator, dtype=torch.float64).squeeze(0) for n in (5, 5, 1, 1))
    rms_dx = RMS_NORM.backward(dy, RMS_NORM.forward(x, w, eps=EPS)[1], w, None)
    layer_dx = LAYER_NORM.backward(dy, LAYER_NORM.forward(x, w, b, eps=EPS)[1], w, b, None, None)
    for what, value in (
        ("RMSNorm <x, dx> = 0", (x * rms_dx).sum(-1) / rms_dx.norm(dim=-1)),
        ("LayerNorm sum dx = 0", layer_dx.sum(-1) / layer_dx.norm(dim=-1)),
        ("LayerNorm <x, dx> = 0", (x * layer_dx).sum(-1) / layer_dx.norm(dim=-1)),
    ):
        yield Finding("L6", "norm", what, "dx", float(value.abs().max()), bound)
    rotated, _ = ROPE.forward(x, theta=1e2, offset=3)
    yield equal("rope", "lengths kept", "y", rotated.norm(dim=-1), x.norm(dim=-1), bound)
    yield equal("rope", "transpose is inverse", "dx", ROPE.backward(rotated, None, theta=1e2, offset=3), x, bound)
