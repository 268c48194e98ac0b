"""The mutants of kernel sets. The folder of the changed file says which set it is planted in, and with that which levels must
find it: `kernels/cpu/attention.py` is judged with ops `cpu`."""

from tapeless.verify.mutant_table import MUTANTS, Mutant

CPU = "kernels/cpu"

KERNEL_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "K1",
        "attention backward sees one key too many",
        f"{CPU}/attention.py",
        "visible = first + i + S - T + 1 if i < count else 0",
        "visible = min(first + i + S - T + 2, S) if i < count else 0",
    ),
    Mutant(
        "K2",
        "dk without the scale",
        f"{CPU}/attention.py",
        "_unpack(dks[s * D_ : s * D_ + D], scale, dk[b, g, s])",
        "_unpack(dks[s * D_ : s * D_ + D], ONE, dk[b, g, s])",
    ),
    Mutant(
        "K3",
        "query heads share the wrong head of keys",
        f"{CPU}/attention.py",
        "right_transposed(k[b, h * G // H], kt, S_)",
        "right_transposed(k[b, h % G], kt, S_)",
    ),
    Mutant(
        "K4",
        "the softmax's gradient without its sum",
        f"{CPU}/rows.py",
        "builder.fsub(builder.load(dplace, align=4), taken))",
        "builder.load(dplace, align=4))",
    ),
    Mutant(
        "K5",
        "pairs of rows interleaved the wrong way round",
        f"{CPU}/packing.py",
        "np.int32(np.uint32(narrow(low[s])) | np.uint32(np.uint32(narrow(high[s])) << SHIFT))",
        "np.int32(np.uint32(narrow(high[s])) | np.uint32(np.uint32(narrow(low[s])) << SHIFT))",
    ),
    Mutant(
        "K6",
        "the rotation is not turned back",
        f"{CPU}/qkv_rope.py",
        "                    _rotate_back(row, cos[t], sin[t])",
        "                    rotate(row, cos[t], sin[t])",
    ),
    Mutant(
        "K7",
        "QK-norm's gradient without the part through the statistic",
        f"{CPU}/qkv_rope.py",
        "row[d] = r * (row[d] * wide(w[d]) - n * against)",
        "row[d] = r * (row[d] * wide(w[d]))",
    ),
    Mutant(
        "K8",
        "a norm's gradient without the residual's",
        f"{CPU}/add_norm.py",
        "put(dx, c, r * (wide(dy[c]) * wide(w[c]) - mean - n * against) + wide(ds[c]))",
        "put(dx, c, r * (wide(dy[c]) * wide(w[c]) - mean - n * against))",
    ),
    Mutant(
        "K9",
        "the gate's gradient without its derivative",
        f"{CPU}/ffn_down.py",
        "put(dgate, i, d * wide(up[i]) * df)",
        "put(dgate, i, d * wide(up[i]) * f)",
    ),
    Mutant(
        "K10",
        "the target's logit is forgotten in the gradient",
        f"{CPU}/linear_cross_entropy.py",
        "dz = factor * exp(z_target - lse) - spread - (ONE - smoothing)",
        "dz = factor * exp(z_target - lse) - spread",
    ),
    Mutant(
        "K11",
        "an ignored target keeps its gradient",
        f"{CPU}/linear_cross_entropy.py",
        "            x[:] = 0\n            return\n",
        "            return\n",
    ),
    Mutant(
        "K12",
        "a token that stands twice is counted once",
        f"{CPU}/embed.py",
        "dw[c] += wide(dy[c])",
        "dw[c] = wide(dy[c])",
    ),
    Mutant(
        "K13",
        "everything decays",
        f"{CPU}/update.py",
        "factor = shrink if decays else ONE",
        "factor = shrink",
    ),
    Mutant(
        "K14",
        "the second moment without its correction",
        f"{CPU}/update.py",
        "(np.float32(sqrt(v[i])) * correction + eps)",
        "(np.float32(sqrt(v[i])) + eps)",
    ),
)


def mutants_of(ops: str) -> tuple[Mutant, ...]:
    """Those that are planted in one set of ops, or in the code around the ops, which is judged with the reference."""
    return tuple(mutant for mutant in MUTANTS + KERNEL_MUTANTS if mutant.ops == ops)
