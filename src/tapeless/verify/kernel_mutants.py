"""The mutants of kernel sets. The folder of the changed file says which set it is planted in, and with that which levels must
find it: `kernels/cpu/attention.py` is judged with ops `cpu`."""

from tapeless.verify.mutant_table import MUTANTS, Mutant

KERNEL_MUTANTS: tuple[Mutant, ...] = ()


def mutants_of(ops: str) -> tuple[Mutant, ...]:
    """Those that are planted in one set of ops, or in the code around the ops, which is judged with the reference."""
    return tuple(mutant for mutant in MUTANTS + KERNEL_MUTANTS if mutant.ops == ops)
