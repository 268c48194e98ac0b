"""The mutants: bugs that people have written into backward passes, each as one replacement in the source.

Numbers and titles are those of docs/verification.md; a letter tells variants of one title apart. X: risks of this code base
that the list does not name. K: bugs of kernels. Nearly all leave the forward and the loss as they are, for a bug there shows by
itself. Places and patterns: places.py.
Tested by: tests/verify/test_mutants.py."""

from typing import NamedTuple

from mutants.places import PACKAGE, find, replaced


class Mutant(NamedTuple):
    number: str
    name: str
    place: str
    old: str  # a pattern that matches once there
    new: str

    @property
    def file(self) -> str:
        """Relative to the package."""
        return find(self.place, self.old).file

    @property
    def module(self) -> str:
        return f"{PACKAGE.name}.{self.file.removesuffix('.py').replace('/', '.')}"

    @property
    def ops(self) -> str:
        """The set of ops whose kernels are changed; the reference where it is none's."""
        folder, *inner = self.file.split("/")[:-1]
        return inner[0] if folder == "kernels" and inner else "reference"

    def source(self) -> str:
        """The whole file with the replacement made."""
        return replaced(find(self.place, self.old), self.new)


# Places of several mutants.
ATTENTION, DZ = "ops:attention_backward", "$p * ($dp - $sum) / math.sqrt($D)"
P = "$p = ($f($q, $k, $documents) - $lse).exp()"
CROSS_ENTROPY, LINEAR_CROSS_ENTROPY = "ops:cross_entropy_backward", "ops:linear_cross_entropy_backward"
LINEAR, RMS_NORM, DROPOUT = "ops:linear_backward", "ops:rms_norm_backward", "ops:dropout_backward"
RMS_DX = "$r * ($dn - $n * ($dn * $n).mean(-1, keepdim=True))"
ROPE, QKV_ROPE, POSITIONS = "ops:rope_backward", "ops:qkv_rope_backward", "ops:positions_backward"
TURN_BACK = "[$lo * $cos + $hi * $sin, $hi * $cos - $lo * $sin]"
ACCUMULATE, TRAINER, CPU = "training:accumulate_gradients", "training:Trainer", "kernels/cpu"

LISTED = (
    Mutant(
        "1",
        "attention residual dropped",
        "#pre-norm-residual",
        "$norm.backward($ds, *$rest)",
        "$norm.backward(None if sublayer.kind == 'attn' else $ds, *$rest)",
    ),
    Mutant(
        "2",
        "ffn residual dropped",
        "#pre-norm-residual",
        "$norm.backward($ds, *$rest)",
        "$norm.backward(None if sublayer.kind == 'ffn' else $ds, *$rest)",
    ),
    Mutant(
        "3",
        "residual added twice",
        "#pre-norm-residual",
        "$norm.backward($ds, *$rest)",
        "$norm.backward(2 * $ds if sublayer.kind == 'attn' else $ds, *$rest)",
    ),
    Mutant("4", "missing 1/N", CROSS_ENTROPY, "$dz *= $dloss / ($n or $count)", "$dz *= $dloss"),
    Mutant(
        "5a",
        "1/N counts ignored targets, in backward",
        LINEAR_CROSS_ENTROPY,
        "$n or $valid($targets)",
        "$n or $targets.numel()",
    ),
    Mutant(
        "5b",
        "1/N counts ignored targets, in both passes",
        "ops:valid_targets",
        "max(int(($targets != $ignored).sum()), 1)",
        "$targets.numel()",
    ),
    Mutant(
        "6",
        "mean of micro-batch means",
        ACCUMULATE,
        '$options |= {"num_targets": $n, **$rest}',
        '$options |= {"num_targets": grad_accum * valid_targets(y), **$rest}',
    ),
    Mutant(
        "7",
        "accumulation without 1/k",
        ACCUMULATE,
        '$options |= {"num_targets": $n, **$rest}',
        '$options |= {"num_targets": None, **$rest}',
    ),
    Mutant(
        "8",
        "gradients not zeroed",
        ACCUMULATE,
        '$options |= {"accumulate": bool($losses) and $r.accumulates}',
        '$options |= {"accumulate": True}',
    ),
    Mutant(
        "9",
        "dW transposed (square)",
        LINEAR,
        "accumulate_matmul($dw, rows($dy).t(), rows($x))",
        "accumulate_matmul($dw, *((rows($x).t(), rows($dy)) if $dw.shape[0] == $dw.shape[1] else (rows($dy).t(), rows($x))))",
    ),
    Mutant(
        "10",
        "dX uses W, not its transpose (square)",
        LINEAR,
        "$dy @ $w",
        "$dy @ ($w.t() if $w.shape[0] == $w.shape[1] else $w)",
    ),
    Mutant(
        "11",
        "bias summed over the wrong axis",
        LINEAR,
        "add_row_sum($db, $dy)",
        "add_row_sum($db, $dy.transpose(0, -1).reshape($dy.shape))",
    ),
    Mutant(
        "12",
        "bias gradient missing",
        "#attn-out-backward",
        "$f($op, $dy, $saved, $p, $g, *$rest)",
        "$f($op, $dy, $saved, $p, $g._replace(b=None), *$rest)",
    ),
    Mutant(
        "13",
        "weight gradient from the wrong activation",
        "#sublayer-backward",
        "$f($dy, $saved.sublayer, *$rest)",
        "$f($dy, $saved.sublayer if i == 0 else "
        "$saved.sublayer._replace(up_linear=saved.branches[0].sublayer.qkv_linear), *$rest)",
    ),
    Mutant("14", "stale saved activation", "#block-backward", "$blocks.pop()", "$blocks[max(i - 1, 0)]"),
    Mutant("15", "softmax Jacobian diagonal only", ATTENTION, DZ, "$p * (1 - $p) * $dp / math.sqrt($D)"),
    Mutant("16", "softmax without its row sum", ATTENTION, DZ, "$p * $dp / math.sqrt($D)"),
    Mutant("17", "1/sqrt(d) missing in backward", ATTENTION, DZ, "$p * ($dp - $sum)"),
    Mutant("18", "scale twice", ATTENTION, DZ, "$p * ($dp - $sum) / $D"),
    Mutant(
        "19",
        "causal mask off by one in backward",
        ATTENTION,
        P,
        "$p = ($f($q, $k, $documents) - $lse).exp().tril($k.shape[-2] - $q.shape[-2] - 1)",
    ),
    Mutant(
        "20",
        "mask missing in backward",
        ATTENTION,
        P,
        "$p = ($q @ $k.transpose(-1, -2) / math.sqrt($q.shape[-1]) - $lse).exp()",
    ),
    Mutant("21", "dK, dV swapped", ATTENTION, "return $dq, $dk, $dv", "return $dq, $dv, $dk"),
    Mutant(
        "22",
        "GQA: first head of the group only",
        ATTENTION,
        "(dz.transpose(-1, -2) @ $q).sum(2)",
        "(dz.transpose(-1, -2) @ $q)[:, :, 0]",
    ),
    Mutant("23", "GQA averaged", ATTENTION, "(p.transpose(-1, -2) @ $do).sum(2)", "(p.transpose(-1, -2) @ $do).mean(2)"),
    Mutant("24", "RoPE not inverted", ROPE, TURN_BACK, "[$lo * $cos - $hi * $sin, $hi * $cos + $lo * $sin]"),
    Mutant(
        "25",
        "RoPE applied to dV",
        QKV_ROPE,
        "dk = rope_backward($dk, *$a, **$k)",
        "dk, dv = (rope_backward(x, *$a, **$k) for x in (dk, dv))",
    ),
    Mutant(
        "26",
        "wrong RoPE pairing",
        ROPE,
        f"$lo, $hi = $dy.chunk(2, -1)\nreturn torch.cat({TURN_BACK}, -1).to($dtype)",
        f"$lo, $hi = $dy[..., 0::2], $dy[..., 1::2]\nreturn torch.stack({TURN_BACK}, -1).flatten(-2).to($dtype)",
    ),
    Mutant("27", "RoPE position off by one", ROPE, "$f($dy, $theta, $offset)", "$f($dy, $theta, $offset + 1)"),
    Mutant("28", "RMSNorm second term dropped", RMS_NORM, RMS_DX, "$r * $dn"),
    Mutant(
        "29",
        "divided by the wrong size",
        RMS_NORM,
        RMS_DX,
        "$r * ($dn - $n * ($dn * $n).sum(-1, keepdim=True) / $dn.shape[0])",
    ),
    Mutant("30", "norm weight missing in dx", RMS_NORM, "$dn = $dy.to($dtype) * w", "$dn = $dy.to($dtype)"),
    Mutant(
        "31",
        "eps missing in backward",
        RMS_NORM,
        "$x, $r = $saved",
        "$x, $r = $saved\n$r = torch.rsqrt(($x.to($r.dtype) * $x).mean(-1, keepdim=True))",
    ),
    Mutant("32", "LayerNorm mean term dropped", "ops:layer_norm_backward", "$dn - $dn.mean(-1, keepdim=True)", "$dn"),
    Mutant(
        "33", "norm dw not summed over the batch", RMS_NORM, "add_row_sum($dw, $dy * $n)", "add_row_sum($dw, ($dy * $n)[0])"
    ),
    Mutant("34", "SiLU' = sigmoid", "ops:dsilu", "$s * (1 + $x * (1 - $s))", "$s"),
    Mutant(
        "35", "gate and up swapped", "ops:_gated.backward", "torch.cat([$dgate, $dup], -1)", "torch.cat([$dup, $dgate], -1)"
    ),
    Mutant(
        "36",
        "GELU tanh forward, erf backward",
        "ops:dgelu",
        "0.5 * (1 + $t) + 0.5 * $x * (1 - $t * $t) * $du",
        "0.5 * (1 + torch.erf($x / math.sqrt(2))) + $x * torch.exp(-$x * $x / 2) / math.sqrt(2 * math.pi)",
    ),
    Mutant(
        "37",
        "embedding scatter overwrites repeats",
        "ops:embed_backward",
        "$dw.index_add_(0, $tokens, $dy)",
        "$dw.index_put_(($tokens,), $dw[$tokens] + $dy)",
    ),
    Mutant(
        "38a",
        "tied weight: the head's contribution only",
        "#embed-backward",
        "$op.backward($dx, $saved, $w, $dw)",
        "$op.backward($dx, $saved, $w, None if self.config.tie_embeddings else $dw)",
    ),
    Mutant(
        "38b",
        "tied weight: the embedding's contribution only",
        "#head-backward",
        "$p, $g = self._p, self._g",
        "$p, $g = self._p, self._g._replace(head=None) if self.config.tie_embeddings else self._g",
    ),
    Mutant("39", "learned positions not summed over the batch", POSITIONS, "$dy.sum(0, **$k)", "$dy[0]"),
    Mutant(
        "40",
        "targets shifted in backward",
        CROSS_ENTROPY,
        "$targets.unsqueeze(-1).clamp_min(0)",
        "$targets.roll(1, -1).unsqueeze(-1).clamp_min(0)",
    ),
    Mutant("41a", "z-loss term missing", CROSS_ENTROPY, "$dz *= 1 + 2 * $z_loss * $lse", "pass"),
    Mutant("41b", "smoothing term missing", CROSS_ENTROPY, "$dz -= $smoothing / $z.shape[-1]", "pass"),
    Mutant("42", "soft-cap derivative missing", CROSS_ENTROPY, "$dz = softcap_backward($dz, *$a, **$k)", "pass"),
    Mutant("43a", "dropout without 1/(1-p)", DROPOUT, "$dy * $scale($dy, $p, *$r)", "$dy * $scale($dy, $p, *$r) * (1 - $p)"),
    Mutant("43b", "dropout with a fresh mask", DROPOUT, "$scale($dy, $p, $key, *$r)", "$scale($dy, $p, $key + 1, *$r)"),
    Mutant(
        "44",
        "recompute with other randomness",
        "#recompute-full",
        "$x, $delta, $branches = $start",
        "$x, $delta, $branches = $start\n"
        "ctx = ctx._replace(dropout=ctx.dropout and ctx.dropout._replace(step=ctx.dropout.step + 1))",
    ),
    Mutant("48", "Adam's t off by one", "optim:FlatOptimizer.__init__", "self.t = 0", "self.t = 1"),
    Mutant(
        "49",
        "eps inside the root",
        "optim:Adam",
        "$v.sqrt().div_($root).add_($eps)",
        "$v.div($root * $root).add_($eps).sqrt_()",
    ),
    Mutant(
        "50",
        "coupled decay",
        "optim:AdamW",
        "self._shrink($f)\nself._move($g, $where, $s)",
        "self._move(self._coupled($g), $where, $s)",
    ),
    Mutant("51a", "decay on norms and biases, by the optimizer", "#decayed-spans", "$name in $decay", "True"),
    Mutant(
        "51b",
        "decay on norms, by the table",
        "#norm-specs",
        'ParamSpec($name, $shape, "ones", False, *$rest)',
        'ParamSpec($name, $shape, "ones", True, *$rest)',
    ),
    Mutant(
        "52",
        "betas swapped",
        "optim:Adam.__init__",
        "self.beta1, self.beta2, self.eps = $b1, $b2, $eps",
        "self.beta1, self.beta2, self.eps = $b2, $b1, $eps",
    ),
    Mutant(
        "53",
        "learning rate off by one after resume",
        TRAINER,
        "scheduled_rate(self.config, $step, $total, $warmup)",
        "scheduled_rate(self.config, $step + (self.resumed_from is not None), $total, $warmup)",
    ),
    Mutant("54a", "bias summed in bf16", "ops:add_row_sum", "rows($x).sum(0, **$k)", "rows($x).sum(0)"),
    Mutant("54b", "every statistic in bf16", "ops:accumulation_dtype", "torch.promote_types($dtype, torch.float32)", "$dtype"),
)

EXTRA = (
    Mutant("X1", "document mask missing in backward", ATTENTION, P, "$p = ($f($q, $k, None) - $lse).exp()"),
    Mutant("X2", "soft-cap derivative missing after logits()", "#softcap-backward", "$saved is not None", "False"),
    Mutant("X3", "add_norm loses ds", "ops:_add_norm.backward", "$dx if $ds is None else $dx + $ds", "$dx"),
    Mutant("X4", "offset ignored by learned positions", "ops:positions_forward", "$x + $w[$a:$b]", "$x + $w[: $x.shape[1]]"),
    Mutant(
        "X5",
        "each chunk of rows divided by its own targets",
        LINEAR_CROSS_ENTROPY,
        "$f(*$a, num_targets=$n, **$k)",
        "$f(*$a, num_targets=None, **$k)",
    ),
    Mutant(
        "X6",
        "kv_cache loses the newest token",
        "#kv-cache",
        "$k, $v = $keys[:, :, :$end], $values[:, :, :$end]",
        "$end = max(ctx.offset, $k.shape[2])\n$k, $v = $keys[:, :, :$end], $values[:, :, :$end]",
    ),
    Mutant("X7", "mask counts queries from the first key, not the last", "ops:_scores", "$m.triu($S - $T + 1)", "$m.triu(1)"),
    Mutant(
        "X8",
        "the past sees one token of the future, both passes",
        "ops:_scores",
        "$m.triu($S - $T + 1)",
        "$m.triu($S - $T + 2)",
    ),
    Mutant(
        "X9",
        "cheap hands the ffn the wrong stream's norm",
        "#recompute-cheap-norm",
        "$saved.branches[$before].s",
        "$saved.branches[0].s",
    ),
    Mutant(
        "X10",
        "cheap, post-norm: the ffn's input not normed",
        "#recompute-cheap-input",
        "$f($saved, x, *$rest)",
        "$f($saved, x if self.is_pre_norm or before < 0 else s, *$rest)",
    ),
    Mutant("X11", "post-norm: ffn residual dropped", "#post-norm-residual", "$ds + $dx", "$dx if i else $ds + $dx"),
    Mutant("X12", "post-norm: attention residual dropped", "#post-norm-residual", "$ds + $dx", "$ds + $dx if i else $dx"),
    Mutant(
        "X13",
        "QK-norm: q's weight gradient added to k's",
        QKV_ROPE,
        "$f($dq, $saved, wq_norm, dwq_norm)",
        "$f($dq, $saved, wq_norm, dwk_norm)",
    ),
    Mutant("X14", "embedding dropout missing in backward", "#embed-dropout", "$dx = $f($dx, *$rest)", "pass"),
    Mutant(
        "X15",
        "smoothing leaves the target its whole weight",
        CROSS_ENTROPY,
        "torch.full_like($lse, $smoothing - 1)",
        "torch.full_like($lse, -1.0)",
    ),
    Mutant(
        "X16",
        "ignored targets keep their gradient",
        CROSS_ENTROPY,
        "$dz.masked_fill_(($targets == $ignored).unsqueeze(-1), 0.0)",
        "$dz",
    ),
    Mutant(
        "X17",
        "matrix gradients overwritten, not accumulated",
        "ops:accumulate_matmul",
        "$dw.addmm_($a, $b)",
        "$dw.copy_($a @ $b)",
    ),
    Mutant(
        "X18",
        "the same mask for every micro-batch",
        "ops:dropout_scale",
        "torch.arange($first, $first + $n, **$k)",
        "torch.arange($n, **$k)",
    ),
    Mutant("X19", "relu2' without its 2", "ops:drelu2", "2 * $relu", "$relu"),
    Mutant(
        "X20",
        "LayerNorm bias gradient overwritten",
        "ops:layer_norm_backward",
        "add_row_sum(db, $dy)",
        "add_row_sum(db.zero_(), $dy)",
    ),
    Mutant("X21", "Adam's t begins anew after resume", TRAINER, "self.steps - self.skipped", "0"),
    Mutant(
        "X22",
        "short gradients stretched to the limit",
        "optim:clip_scale",
        "0 < $limit < $norm < $inf",
        "0 < $limit and $norm < $inf",
    ),
    Mutant("X23", "decay reaches one parameter too far", "#decayed-neighbours", "$f = $n in $d", "$f = $n in $d or $f"),
    Mutant(
        "X24", "momentum damped by 1 - mu", "optim:SGD", "$u.mul_($mu).addcmul_($d, $one)", "$u.mul_($mu).addcmul_($d, 1 - $mu)"
    ),
    Mutant(
        "X25", "dropout masks repeat every step", TRAINER, "train_step(*$a, step=$s, **$k)", "train_step(*$a, step=0, **$k)"
    ),
    Mutant("X26", "Muon iterates once too few", "optim:orthogonal", "range($n)", "range($n - 1)"),
    Mutant("X27", "Muon's step scaled by rows, whatever is larger", "optim:Muon", "max($shape)", "$shape[0]"),
    Mutant("X28", "Muon does not look ahead", "optim:Muon", "$ahead if self.nesterov else $m", "$m"),
    Mutant("X29", "Muon takes embeddings and head too", "optim:", '("embed.w", "pos.w", "head.w")', "()"),
    Mutant("X30", "Muon's matrices do not decay", "optim:Muon", "$name in self.decay", "False"),
    Mutant("X31", "Muon divides by half the norm", "optim:orthogonal", "$n.clamp_min($least)", "$n.clamp_min($least) * 0.5"),
    Mutant(
        "X32",
        "Muon's momentum is saved, but not resumed",
        "optim:Muon",
        "dict($momenta)",
        "{k: m.clone() for k, m in $momenta.items()}",
    ),
    Mutant(
        "X33",
        "the average begins with the initial weights",
        "optim:decay_at",
        "($t - 1) / ($t + $n)",
        "$t / ($t + $n + 1)",
    ),
    Mutant("X34", "the average's decay does not rise", "optim:decay_at", "min($decay, $rising)", "$decay"),
    Mutant(
        "X35",
        "the average's t begins anew after resume",
        TRAINER,
        "self.ema.update($t)",
        "self.ema.update($t - (self.resumed_from or 0))",
    ),
    Mutant("X36", "the average is not resumed", TRAINER, "restore(self.ema.named(), *$a)", "None"),
    Mutant("X37", "adapter: scale missing in backward", "ops:lora_backward", "($dy @ $b) * $scale", "$dy @ $b"),
    Mutant("X38", "adapter: db of what is not scaled", "ops:lora_forward", "LoraSaved($saved, $u)", "LoraSaved($saved, xa)"),
    Mutant("X39", "adapter: nothing goes back through a", "#lora-dx", "$dx += $term", "$term"),
    Mutant(
        "X40",
        "adapter: the gradient of its neighbour's columns",
        "#lora-columns",
        "$dy[..., $first : $first + $n]",
        "$dy[..., :$n]",
    ),
)

MUTANTS = LISTED + EXTRA

KERNEL_MUTANTS = (
    Mutant(
        "K1",
        "attention backward sees one key too many",
        f"{CPU}:_backward",
        "$first + $i + $S - $T + 1 if $i < $n else 0",
        "min($first + $i + $S - $T + 2, $S) if $i < $n else 0",
    ),
    Mutant(
        "K2", "dk without the scale", f"{CPU}:_backward", "$f($part, $scale, dk[$b, $g, $s])", "$f($part, ONE, dk[$b, $g, $s])"
    ),
    Mutant("K3", "query heads share the wrong head of keys", f"{CPU}:_forward", "k[$b, $h * $G // $H]", "k[$b, $h % $G]"),
    Mutant(
        "K4",
        "the softmax's gradient without its sum",
        f"{CPU}:softmax_row_backward",
        "builder.fsub($dp, taken)",
        "$dp",
    ),
    Mutant(
        "K5",
        "pairs of rows interleaved the wrong way round",
        f"{CPU}:_interleaved_scores",
        "np.uint32($f($low[$s])) | np.uint32(np.uint32($f($high[$s])) << $n)",
        "np.uint32($f($high[$s])) | np.uint32(np.uint32($f($low[$s])) << $n)",
    ),
    Mutant(
        "K6",
        "the rotation is not turned back",
        "#rotate-back",
        "_rotate_back($row, $cos, $sin)",
        "rotate($row, $cos, $sin)",
    ),
    Mutant(
        "K7",
        "QK-norm's gradient without the part through the statistic",
        f"{CPU}:_norm_backward",
        "$r * ($dy * $w - $n * $against)",
        "$r * ($dy * $w)",
    ),
    Mutant("K8", "a norm's gradient without the residual's", f"{CPU}:_row_gradient", "$dx + wide($ds[$c])", "$dx"),
    Mutant(
        "K9",
        "the gate's gradient without its derivative",
        f"{CPU}:_gated.backward",
        "$d * wide($up[$i]) * df",
        "$d * wide($up[$i]) * f",
    ),
    Mutant(
        "K10",
        "the target's logit is forgotten in the gradient",
        f"{CPU}:_row.gradient",
        "$p - $spread - ($one - $smoothing)",
        "$p - $spread",
    ),
    Mutant("K11", "an ignored target keeps its gradient", f"{CPU}:_row.gradient", "$x[:] = 0\nreturn", "return"),
    Mutant("K12", "a token that occurs twice is counted once", f"{CPU}:add_span", "$dw[$c] += $dy", "$dw[$c] = $dy"),
    Mutant("K13", "everything decays", f"{CPU}:_adam_pieces", "$shrink if $decays else $one", "$shrink"),
    Mutant("K14", "the second moment without its correction", f"{CPU}:_adam", "$root * correction + $eps", "$root + $eps"),
)


def mutants_of(ops: str) -> tuple[Mutant, ...]:
    """Those that are planted in one set of ops, or in the code around the ops, which is judged with the reference."""
    return tuple(mutant for mutant in MUTANTS + KERNEL_MUTANTS if mutant.ops == ops)
