"""The mutants: bugs that people have written into backward passes, each as one replacement in the source.

Numbers and titles are those of docs/verification.md; a letter tells variants of one title apart. X: risks of this code base
that the list does not name. Nearly all leave the forward and the loss as they are, for a bug there shows by itself.
Tested by: tests/verify/test_mutants.py."""

from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1]


class Mutant(NamedTuple):
    number: str
    name: str
    file: str  # relative to the package
    old: str  # occurs exactly once in the file
    new: str

    @property
    def module(self) -> str:
        return f"{PACKAGE.name}.{self.file.removesuffix('.py').replace('/', '.')}"

    @property
    def ops(self) -> str:
        """The set whose kernels are changed; the reference where it is none's."""
        folder, *inner = self.file.split("/")[:-1]
        return inner[0] if folder == "kernels" and inner else "reference"

    def source(self) -> str:
        """The whole file with the replacement made."""
        healthy = (PACKAGE / self.file).read_text(encoding="utf-8")
        if healthy.count(self.old) != 1:
            raise ValueError(
                f"mutant {self.number}: the old text occurs {healthy.count(self.old)} times in {self.file}, not once"
            )
        return healthy.replace(self.old, self.new)


ATTENTION, BLOCK, TRANSFORMER = "ops/attention.py", "model/block.py", "model/transformer.py"
CROSS_ENTROPY, LINEAR_CROSS_ENTROPY = "ops/cross_entropy.py", "ops/linear_cross_entropy.py"
LINEAR, SUBLAYERS, DROPOUT = "ops/linear.py", "model/sublayers.py", "ops/dropout.py"
RMS_NORM, LAYER_NORM, POINTWISE = "ops/rms_norm.py", "ops/layer_norm.py", "ops/pointwise.py"
ROPE, QKV_ROPE, POSITIONS = "ops/rope.py", "ops/qkv_rope.py", "ops/positions.py"
NUMERICS, PARAMS = "ops/numerics.py", "model/params.py"
LORA, PRODUCT = "ops/lora.py", "model/product.py"
STEP, TRAINER, ADAM, FLAT = "train/step.py", "train/trainer.py", "optim/adam.py", "optim/flat.py"
MUON, EMA = "optim/muon.py", "optim/ema.py"

# Lines that several mutants change.
DZ = "dz = p * (dp - (do * o).sum(-1, keepdim=True)) / math.sqrt(D)"
P = "p = (_scores(q, k, saved.documents) - saved.lse).exp()"
DW_PRODUCT = "accumulate_matmul(dw, rows(dy).t(), rows(saved.x))"
RMS_DX = "return (r * (dn - n * (dn * n).mean(-1, keepdim=True))).to(x.dtype)"
DROPPED = "return dy * dropout_scale(dy, p, key, first_sample)"
RMS_DN = "dn = dy.to(r.dtype) * w"
UNTURNED = "[dlo * cos + dhi * sin, dhi * cos - dlo * sin]"

LISTED = (
    Mutant(
        "1", "attention residual dropped", BLOCK, "return add_norm.backward(ds1, dn1,", "return add_norm.backward(None, dn1,"
    ),
    Mutant("2", "ffn residual dropped", BLOCK, "add_norm.backward(dy, dn2,", "add_norm.backward(None, dn2,"),
    Mutant(
        "3", "residual added twice", BLOCK, "return add_norm.backward(ds1, dn1,", "return ds1 + add_norm.backward(ds1, dn1,"
    ),
    Mutant("4", "missing 1/N", CROSS_ENTROPY, "dz *= dloss / (num_targets or valid_targets(targets))", "dz *= dloss"),
    Mutant(
        "5a",
        "1/N counts ignored targets, in backward",
        LINEAR_CROSS_ENTROPY,
        "x, targets, lse = saved\n    count = num_targets or valid_targets(targets)",
        "x, targets, lse = saved\n    count = num_targets or targets.numel()",
    ),
    Mutant(
        "5b",
        "1/N counts ignored targets, in both passes",
        CROSS_ENTROPY,
        "return max(int((targets != IGNORED).sum()), 1)",
        "return targets.numel()",
    ),
    Mutant(
        "6",
        "mean of micro-batch means",
        STEP,
        '"num_targets": num_targets,',
        '"num_targets": grad_accum * valid_targets(y),',
    ),
    Mutant("7", "accumulation without 1/k", STEP, '"num_targets": num_targets,', '"num_targets": None,'),
    Mutant("8", "gradients not zeroed", STEP, '"fresh": not losses', '"fresh": False'),
    Mutant(
        "9",
        "dW transposed (square)",
        LINEAR,
        DW_PRODUCT,
        "a, c = (saved.x, dy) if dw.shape[0] == dw.shape[1] else (dy, saved.x)\n"
        "        accumulate_matmul(dw, rows(a).t(), rows(c))",
    ),
    Mutant(
        "10",
        "dX uses W, not its transpose (square)",
        LINEAR,
        "return dy @ w",
        "return dy @ (w.t() if w.shape[0] == w.shape[1] else w)",
    ),
    Mutant(
        "11",
        "bias summed over the wrong axis",
        LINEAR,
        "add_row_sum(db, dy)",
        "add_row_sum(db, dy.transpose(0, -1).reshape(dy.shape))",
    ),
    Mutant(
        "12",
        "bias gradient missing",
        SUBLAYERS,
        "do = product_backward(ops.linear, da, saved.out_linear, p.wo, g.wo, call.lora_scale)",
        "do = product_backward(ops.linear, da, saved.out_linear, p.wo, g.wo._replace(b=None), call.lora_scale)",
    ),
    Mutant(
        "13",
        "weight gradient from the wrong activation",
        BLOCK,
        "dn2 = feed_forward_backward(dy, saved.ffn, p, g, call, layer)",
        "dn2 = feed_forward_backward(dy, saved.ffn._replace(up_linear=saved.attn.qkv_linear), p, g, call, layer)",
    ),
    Mutant("14", "stale saved activation", TRANSFORMER, "kept.blocks.pop()", "kept.blocks[max(i - 1, 0)]"),
    Mutant("15", "softmax Jacobian diagonal only", ATTENTION, DZ, "dz = p * (1 - p) * dp / math.sqrt(D)"),
    Mutant("16", "softmax without its row sum", ATTENTION, DZ, "dz = p * dp / math.sqrt(D)"),
    Mutant("17", "1/sqrt(d) missing in backward", ATTENTION, DZ, "dz = p * (dp - (do * o).sum(-1, keepdim=True))"),
    Mutant("18", "scale twice", ATTENTION, DZ, "dz = p * (dp - (do * o).sum(-1, keepdim=True)) / D"),
    Mutant("19", "causal mask off by one in backward", ATTENTION, P, f"{P}.tril(k.shape[-2] - T - 1)"),
    Mutant("20", "mask missing in backward", ATTENTION, P, "p = (q @ k.transpose(-1, -2) / math.sqrt(D) - saved.lse).exp()"),
    Mutant("21", "dK, dV swapped", ATTENTION, "dk.to(dtype), dv.to(dtype)", "dv.to(dtype), dk.to(dtype)"),
    Mutant(
        "22",
        "GQA: first head of the group only",
        ATTENTION,
        "dk = (dz.transpose(-1, -2) @ q).sum(2)",
        "dk = (dz.transpose(-1, -2) @ q)[:, :, 0]",
    ),
    Mutant(
        "23", "GQA averaged", ATTENTION, "dv = (p.transpose(-1, -2) @ do).sum(2)", "dv = (p.transpose(-1, -2) @ do).mean(2)"
    ),
    Mutant("24", "RoPE not inverted", ROPE, UNTURNED, "[dlo * cos - dhi * sin, dhi * cos + dlo * sin]"),
    Mutant(
        "25",
        "RoPE applied to dV",
        QKV_ROPE,
        "dk = rope_backward(dk, None, theta=theta, offset=offset)",
        "dk, dv = (rope_backward(x, None, theta=theta, offset=offset) for x in (dk, dv))",
    ),
    Mutant(
        "26",
        "wrong RoPE pairing",
        ROPE,
        f"dlo, dhi = dy.chunk(2, -1)\n    return torch.cat({UNTURNED}, -1)",
        f"dlo, dhi = dy[..., 0::2], dy[..., 1::2]\n    return torch.stack({UNTURNED}, -1).flatten(-2)",
    ),
    Mutant("27", "RoPE position off by one", ROPE, "rope_tables(dy, theta, offset)", "rope_tables(dy, theta, offset + 1)"),
    Mutant("28", "RMSNorm second term dropped", RMS_NORM, RMS_DX, "return (r * dn).to(x.dtype)"),
    Mutant(
        "29",
        "divided by the wrong size",
        RMS_NORM,
        RMS_DX,
        "return (r * (dn - n * (dn * n).sum(-1, keepdim=True) / x.shape[0])).to(x.dtype)",
    ),
    Mutant("30", "norm weight missing in dx", RMS_NORM, RMS_DN, "dn = dy.to(r.dtype)"),
    Mutant(
        "31",
        "eps missing in backward",
        RMS_NORM,
        "x, r = saved",
        "x, r = saved\n    r = torch.rsqrt((x.to(r.dtype) * x).mean(-1, keepdim=True))",
    ),
    Mutant("32", "LayerNorm mean term dropped", LAYER_NORM, "dn - dn.mean(-1, keepdim=True) - n", "dn - n"),
    Mutant("33", "norm dw not summed over the batch", RMS_NORM, "add_row_sum(dw, dy * n)", "add_row_sum(dw, (dy * n)[0])"),
    Mutant("34", "SiLU' = sigmoid", POINTWISE, "return s * (1 + x * (1 - s))", "return s"),
    Mutant("35", "gate and up swapped", "ops/ffn_gate.py", "torch.cat([dgate, dup], -1)", "torch.cat([dup, dgate], -1)"),
    Mutant(
        "36",
        "GELU tanh forward, erf backward",
        POINTWISE,
        "return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * du",
        "return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)",
    ),
    Mutant(
        "37",
        "embedding scatter overwrites repeats",
        "ops/embed.py",
        "dw.index_add_(0, saved.tokens.reshape(-1), rows(dy).to(dw.dtype))",
        "dw[saved.tokens.reshape(-1)] += rows(dy).to(dw.dtype)",
    ),
    Mutant(
        "38a",
        "tied weight: the head's contribution only",
        TRANSFORMER,
        "call.ops.embed.backward(dx, kept.embed, p.embed, g.embed)",
        "call.ops.embed.backward(dx, kept.embed, p.embed, None if c.tie_embeddings else g.embed)",
    ),
    Mutant(
        "38b",
        "tied weight: the embedding's contribution only",
        TRANSFORMER,
        "p, g = self._p, self._g\n",
        "p, g = self._p, self._g\n        g = g._replace(head=None) if self.config.tie_embeddings else g\n",
    ),
    Mutant("39", "learned positions not summed over the batch", POSITIONS, "dy.sum(0, dtype=accumulation_dtype(dy))", "dy[0]"),
    Mutant(
        "40",
        "targets shifted in backward",
        CROSS_ENTROPY,
        "target = targets.unsqueeze(-1).clamp_min(0)",
        "target = targets.roll(1, -1).unsqueeze(-1).clamp_min(0)",
    ),
    Mutant("41a", "z-loss term missing", CROSS_ENTROPY, "dz *= 1 + 2 * z_loss * lse", "pass"),
    Mutant("41b", "smoothing term missing", CROSS_ENTROPY, "dz -= label_smoothing / z.shape[-1]", "pass"),
    Mutant(
        "42", "soft-cap derivative missing", CROSS_ENTROPY, "dz = softcap_backward(dz, SoftcapSaved(z), cap=softcap)", "pass"
    ),
    Mutant("43a", "dropout without 1/(1-p)", DROPOUT, DROPPED, f"{DROPPED} * (1 - p)"),
    Mutant("43b", "dropout with a fresh mask", DROPOUT, DROPPED, DROPPED.replace("key", "key + 1")),
    Mutant(
        "44",
        "recompute with other randomness",
        BLOCK,
        "s, n1, attn_norm = add_norm.forward(saved.x, None, *p.attn_norm, eps=c.norm_eps)\n",
        "s, n1, attn_norm = add_norm.forward(saved.x, None, *p.attn_norm, eps=c.norm_eps)\n"
        "        call = call._replace(dropout=call.dropout and call.dropout._replace(step=call.dropout.step + 1))\n",
    ),
    Mutant("48", "Adam's t off by one", FLAT, "self.t = 0", "self.t = 1"),
    Mutant(
        "49",
        "eps inside the root",
        ADAM,
        "root = v.sqrt().div_(math.sqrt(1 - self.beta2**self.t)).add_(self.eps)",
        "root = v.div(1 - self.beta2**self.t).add_(self.eps).sqrt_()",
    ),
    Mutant("50", "coupled decay", ADAM, "self._shrink()\n        return self.grads", "return self._coupled_grads()"),
    Mutant("51a", "decay on norms and biases, by the optimizer", FLAT, "if name in decay:", "if True:"),
    Mutant("51b", "decay on norms, by the table", PARAMS, '(width,), "ones", False, None)', '(width,), "ones", True, None)'),
    Mutant("52", "betas swapped", ADAM, "self.eps = beta1, beta2, eps", "self.eps = beta2, beta1, eps"),
    Mutant(
        "53",
        "learning rate off by one after resume",
        TRAINER,
        "            step,\n            schedule=",
        "            step + (self.resumed_from is not None),\n            schedule=",
    ),
    Mutant("54a", "bias summed in bf16", NUMERICS, "rows(x).sum(0, dtype=accumulation_dtype(x))", "rows(x).sum(0)"),
    Mutant("54b", "every statistic in bf16", NUMERICS, "torch.promote_types(x.dtype, torch.float32)", "x.dtype"),
)

EXTRA = (
    Mutant("X1", "document mask missing in backward", ATTENTION, P, P.replace("saved.documents", "None")),
    Mutant("X2", "soft-cap derivative missing after logits()", TRANSFORMER, "if kept.softcap is not None:", "if False:"),
    Mutant("X3", "add_norm loses ds", "ops/add_norm.py", "return dx if ds is None else dx + ds", "return dx"),
    Mutant(
        "X4",
        "offset ignored by learned positions",
        POSITIONS,
        "return x + w[offset:end], None",
        "return x + w[: x.shape[1]], None",
    ),
    Mutant(
        "X5",
        "each chunk of rows divided by its own targets",
        LINEAR_CROSS_ENTROPY,
        "num_targets=count,\n",
        "num_targets=None,\n",
    ),
    Mutant(
        "X6",
        "kv_cache loses the newest token",
        "model/decode.py",
        "return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]",
        "end = max(self.length, k.shape[2])\n        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]",
    ),
    Mutant("X7", "mask counts queries from the first key, not the last", ATTENTION, ".triu(S - T + 1)", ".triu(1)"),
    Mutant("X8", "the past sees one token of the future, both passes", ATTENTION, ".triu(S - T + 1)", ".triu(S - T + 2)"),
    Mutant(
        "X9",
        "cheap hands the ffn the wrong stream's norm",
        BLOCK,
        "norm.forward(saved.s1, *p.ffn_norm",
        "norm.forward(saved.x, *p.ffn_norm",
    ),
    Mutant(
        "X10",
        "cheap, post-norm: the ffn's input not normed",
        BLOCK,
        "feed_forward_rebuilt(saved.ffn, n1,",
        "feed_forward_rebuilt(saved.ffn, saved.s1,",
    ),
    Mutant(
        "X11", "post-norm: ffn residual dropped", BLOCK, "dn1 = ds2 + feed_forward_backward(", "dn1 = feed_forward_backward("
    ),
    Mutant(
        "X12",
        "post-norm: attention residual dropped",
        BLOCK,
        "return ds1 + self_attention_backward(",
        "return self_attention_backward(",
    ),
    Mutant("X13", "QK-norm: q's weight gradient added to k's", QKV_ROPE, "wq_norm, dwq_norm)", "wq_norm, dwk_norm)"),
    Mutant("X14", "embedding dropout missing in backward", TRANSFORMER, 'dx = drop_backward(dx, call, "embed")', "pass"),
    Mutant(
        "X15",
        "smoothing leaves the target its whole weight",
        CROSS_ENTROPY,
        "torch.full_like(lse, label_smoothing - 1)",
        "torch.full_like(lse, -1.0)",
    ),
    Mutant(
        "X16",
        "ignored targets keep their gradient",
        CROSS_ENTROPY,
        "dz.masked_fill_((targets == IGNORED).unsqueeze(-1), 0.0)",
        "dz",
    ),
    Mutant("X17", "matrix gradients overwritten, not accumulated", NUMERICS, "dw.addmm_(a, b)", "dw.copy_(a @ b)"),
    Mutant(
        "X18",
        "the same mask for every micro-batch",
        DROPOUT,
        "torch.arange(first_sample * per_sample, first_sample * per_sample + x.numel(), device=x.device)",
        "torch.arange(x.numel(), device=x.device)",
    ),
    Mutant("X19", "relu2' without its 2", POINTWISE, "return 2 * relu(x)", "return relu(x)"),
    Mutant("X20", "LayerNorm bias gradient overwritten", LAYER_NORM, "add_row_sum(db, dy)", "add_row_sum(db.zero_(), dy)"),
    Mutant("X21", "Adam's t begins anew after resume", TRAINER, "self.steps - self.skipped", "0"),
    Mutant("X22", "short gradients stretched to the limit", "optim/clip.py", "0 < limit < norm <", "0 < limit and norm <"),
    Mutant("X23", "decay reaches one parameter too far", FLAT, "follows = name in decay", "follows = name in decay or follows"),
    Mutant("X24", "momentum damped by 1 - mu", "optim/sgd.py", ".add_(d)  #", ".add_(d, alpha=1 - self.momentum)  #"),
    Mutant("X25", "dropout masks repeat every step", TRAINER, "            step=self.steps,\n", "            step=0,\n"),
    Mutant("X26", "Muon iterates once too few", MUON, "in range(ITERATIONS)", "in range(ITERATIONS - 1)"),
    Mutant("X27", "Muon's step scaled by rows, whatever is larger", MUON, "max(w.shape)", "w.shape[0]"),
    Mutant("X28", "Muon does not look ahead", MUON, "m.lerp(g, 1 - self.momentum) if self.nesterov else m", "m"),
    Mutant("X29", "Muon takes embeddings and head too", MUON, '("embed.w", "pos.w", "head.w")', "()"),
    Mutant("X30", "Muon's matrices do not decay", MUON, "if name in self.decay:", "if False:"),
    Mutant(
        "X31",
        "Muon divides by half the norm",
        MUON,
        ".clamp_min(SHORTEST)",
        ".clamp_min(SHORTEST) * 0.5",
    ),
    Mutant(
        "X32",
        "Muon's momentum is saved, but not resumed",
        MUON,
        "dict(self._momenta)",
        "{k: m.clone() for k, m in self._momenta.items()}",
    ),
    Mutant("X33", "the average begins with the initial weights", EMA, "(t - 1) / (t + FORGETS)", "t / (t + FORGETS + 1)"),
    Mutant("X34", "the average's decay does not rise", EMA, "return min(decay, (t - 1) / (t + FORGETS))", "return decay"),
    Mutant(
        "X35",
        "the average's t begins anew after resume",
        TRAINER,
        "self.ema.update(self.optimizer.t)",
        "self.ema.update(self.optimizer.t - (self.resumed_from or 0))",
    ),
    Mutant("X36", "the average is not resumed", TRAINER, "restore(self.ema.named(), average, checkpoint.path)", "pass"),
    Mutant("X37", "adapter: scale missing in backward", LORA, "du = (dy @ b) * scale", "du = dy @ b"),
    Mutant("X38", "adapter: db of what is not scaled", LORA, "LoraSaved(linear_saved, u)", "LoraSaved(linear_saved, xa)"),
    Mutant("X39", "adapter: nothing goes back through a", PRODUCT, "dx += LORA.backward(", "LORA.backward("),
    Mutant(
        "X40",
        "adapter: the gradient of its neighbour's columns",
        PRODUCT,
        "mine = dy[..., first : first + len(b)]",
        "mine = dy[..., : len(b)]",
    ),
)

MUTANTS = LISTED + EXTRA
