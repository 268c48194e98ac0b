"""The parts of the published measurements: each a call of `tapeless bench`, its result in results/PART.json."""

from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"

# The four shapes, with the batch at which each is measured; large steps need fewer rounds, since noise evens out within them.
TRAINING = {
    "llama-tiny": "--preset llama-tiny --batch-size 16 --seq-len 64 --rounds 10 --cold",
    "llama-cllm": "--preset llama-cllm --batch-size 4 --seq-len 32 --rounds 10 --cold",
    "llama-small": "--preset llama-small --batch-size 4 --seq-len 512 --rounds 7 --cold",
    "llama-base": "--preset llama-base --batch-size 1 --seq-len 1024 --rounds 3 --cold --contenders ours,eager,compile,floor",
}
GENERATION = {
    f"generation-{name}": f"--preset {name} --generate --tokens 128 --rounds {rounds}"
    for name, rounds in (("llama-tiny", 10), ("llama-small", 7), ("llama-base", 3))
}
# A vocabulary small enough that the head is not most of the work at every width.
SCALING = {
    "scaling": "--scaling --rounds 2 --hidden-dim 256 --num-layers 4 --num-heads 8 --intermediate-dim 688 --vocab-size 2048"
}
CPU = {**TRAINING, **GENERATION, **SCALING}

# On a GPU, in bfloat16, what one trains in there, and ours in fp8. The compiler's slowest mode takes minutes: its own part.
ON_GPU = "--device cuda --rounds 5 --dtypes"
MODES = "--contenders ours,compile,reduce-overhead"
TUNED = "--contenders ours,compile,max-autotune"
SMALL, MEDIUM, LARGE = (
    "--preset llama-124m --batch-size 32 --seq-len 1024",
    "--preset llama-350m --batch-size 16 --seq-len 1024",
    "--preset llama-1b --batch-size 8 --seq-len 2048",
)
CUDA = {
    "cuda-llama-tiny": f"--preset llama-tiny --batch-size 16 --seq-len 64 {ON_GPU} bfloat16 {MODES}",
    "cuda-llama-124m": f"{SMALL} {ON_GPU} bfloat16,fp8 --contenders ours,deterministic,compile,floor",
    "cuda-llama-350m": f"{MEDIUM} {ON_GPU} bfloat16,fp8 --contenders ours,compile,floor",
    "cuda-llama-1b": f"{LARGE} {ON_GPU} bfloat16,fp8 --contenders ours,compile,floor",
    "cuda-llama-124m-autotune": f"{SMALL} {ON_GPU} bfloat16 {TUNED}",
    "cuda-llama-350m-autotune": f"{MEDIUM} {ON_GPU} bfloat16 {TUNED}",
    "cuda-llama-1b-autotune": f"{LARGE} {ON_GPU} bfloat16 {TUNED}",
    "cuda-llama-124m-kernels": f"{SMALL} {ON_GPU} bfloat16,fp8 --kernels",
    "cuda-llama-124m-largest": f"{SMALL} {ON_GPU} bfloat16,fp8 --largest-batch --contenders ours,compile",
}
CURVE = "fp8-curve"  # by fp8_curve.py
PARTS = {**CPU, **CUDA}
