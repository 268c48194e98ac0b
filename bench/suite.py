"""The parts of the published measurements: each a call of `tapeless bench`, its result in results/PART.json."""

from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"

# The four shapes, with the batch at which each is measured; large steps need fewer rounds, since noise evens out within them.
TRAINING = {
    "llama-tiny": "--preset llama-tiny --batch-size 16 --seq-len 64 --rounds 10 --cold",
    "llama-cllm": "--preset llama-cllm --batch-size 4 --seq-len 32 --rounds 10",
    "llama-small": "--preset llama-small --batch-size 4 --seq-len 512 --rounds 7",
    "llama-base": "--preset llama-base --batch-size 1 --seq-len 1024 --rounds 3 --contenders ours,eager,compile,floor",
}
GENERATION = {
    f"generation-{name}": f"--preset {name} --generate --tokens 128 --rounds {rounds}"
    for name, rounds in (("llama-tiny", 10), ("llama-small", 7), ("llama-base", 3))
}
# A vocabulary small enough that the head is not most of the work at every width.
SCALING = {
    "scaling": "--scaling --rounds 2 --hidden-dim 256 --num-layers 4 --num-heads 8 --intermediate-dim 688 --vocab-size 2048"
}
PARTS = {**TRAINING, **GENERATION, **SCALING}
