"""Every tolerance of the project, relative, by level. docs/verification.md says where they come from; nothing else sets one
but training/invariants.py, whose are listed here."""

from tapeless.training.invariants import IDENTITY as IDENTITY  # set where it is used: train may not look up to verify

ADJOINT = {"float64": 1e-13, "float32": 1e-6}  # L0: <Jv, u> against <v, J'u>
COMPLEX_STEP = 1e-12  # L1 and L2, float64
AUTOGRAD = 1e-11  # L1, float64 against autograd
CENTRAL = 1e-7  # L1, float64, Richardson-extrapolated
CENTRAL_RATIO = 0.2  # how far the error ratio of h and h/2 may be from 4 for such an estimate to be believed
OP_FLOAT32 = 1e-5  # L1: float32 against the same op in float64
OP_BFLOAT16 = 8 * 2**-8  # L1: eight roundings, each at most 2**-8; the worst seen is 3.2 of them
KERNEL_FORWARD, KERNEL_BACKWARD = 2.0, 3.0  # bfloat16: times the error of the reference op in the same dtype

DIRECTION = 1e-8  # L2: directional derivative by central differences, float64
DOWNHILL = 0.5  # full size: how far a short step may fall short of the decrease that the gradient predicts, as a share
SLOPE = (1.95, 2.05)  # L2: order of the Taylor remainder
MODEL_AUTOGRAD = 1e-10  # L2, L2-norm, float64
MODEL_FLOAT32 = 1e-5  # L2, L2-norm, float32 against float64; the worst of 12 seeds was 2.8e-6
MODEL_BFLOAT16, MODEL_BFLOAT16_COSINE = 2e-2, 0.9995  # L2, all gradients together
MODEL_BFLOAT16_TENSOR = 0.5  # L2, each: rounding stays far below, a gradient that is missing or doubled does not


def kernel_bound(error: float, dtype: str) -> float:
    """L2: how far a gradient may be off with other ops than the reference's, whose error in the same dtype is given: a few
    times that, and in any case what any ops may have."""
    always = {"float64": MODEL_AUTOGRAD, "float32": MODEL_FLOAT32, "bfloat16": MODEL_BFLOAT16}
    return max(KERNEL_BACKWARD * error, always[dtype])


# Before a run: one tensor at the run's own depth, where rounding adds up (worst seen 5e-6 and 0.16); a wrong formula gives 1.
FIRST_BATCH = {"float64": 1e-10, "float32": 1e-3, "bfloat16": 0.5, "fp8": 0.7}

HUGGING_FACE = 1e-6  # L3, float64 (transformers computes norms and softmax in float32 inside)
HUGGING_FACE_FLOAT32 = 1e-5  # L3, L2-norm

OPTIMIZER = 1e-12  # one optimizer alone, step by step against torch.optim, float64, divided by the movement
TRAINING = {"float64": 1e-8, "float32": 1e-3}  # L4: weights against torch.optim, divided by how far they moved
TRAINING_LOSS = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1e-2}  # L4: the loss of every step

ACCUMULATION = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 0.1}  # L5: k micro-batches against one batch
METAMORPHIC = {"float64": 1e-12, "float32": 1e-5}  # L6, where not exact

# L6, Muon: matmuls against singular values, relative (worst seen 6e-14, 1.1e-5 and 2.3e-2), and both against the orthogonal
# factor, whose singular values are all 1 where five iterations leave them between 0.68 and 1.21.
NEWTON_SCHULZ = {"float64": 1e-12, "float32": 1e-4, "bfloat16": 0.1}
POLAR = 0.35

UNDERPOWERED = 1e-6  # a tensor whose gradient is below this share of the whole proves nothing
ROUNDING_FLOOR = 1e-15  # what a gradient that is zero by identity may hold instead, relative to the whole
