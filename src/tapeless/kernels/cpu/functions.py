"""exp, sigmoid, tanh and GELU in float32, written so that LLVM vectorises them; libm's would be called element by element.

    e^x = 2^n e^r      n = round(x / ln 2)      r = x - n ln 2, |r| <= 0.35, in two parts to avoid cancellation
    e^r = 1 + r + r^2 g(r), g a polynomial of degree 4 through Chebyshev points: error 1e-8, less than a rounding
Tested by: tests/kernels/cpu/test_functions.py."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from tapeless.kernels.cpu.jit import BITS, FLOAT, exact, inlined

LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # the first has few bits: n times it is exact
LOWEST, HIGHEST = np.float32(-87.33654), np.float32(88.72283)  # the smallest normal e^x; from 88.38 on it is infinite
SHIFT = np.float32(1.5 * 2**23)  # adding and subtracting it rounds to an integer
SHIFT_BITS = int(SHIFT.view(np.uint32))
ONE, HALF, TWO = np.float32(1), np.float32(0.5), np.float32(2)
C6, C5, C4, C3 = (np.float32(c) for c in (0.0013926213465482, 0.0083632029715893, 0.0416665544376950, 0.1666657684599387))
T3, T5, T7, NEAR = (np.float32(c) for c in (-1 / 3, 2 / 15, -17 / 315, 0.2**2))  # series of tanh, and where it suffices
GELU_K, GELU_C = np.float32(0.7978845608028654), np.float32(0.044715)


@intrinsic
def _power_of_two(typingctx: Any, shifted: Any) -> Any:
    """2^n as a float32, from the low bits of SHIFT + n. A NaN gives some number, which the caller multiplies by NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        n = builder.sub(builder.bitcast(args[0], BITS), BITS(SHIFT_BITS))
        return builder.bitcast(builder.shl(builder.add(n, BITS(127)), BITS(23)), FLOAT)

    return types.float32(types.float32), codegen


@exact
def exp(x):
    low = LOWEST if x < LOWEST else x  # comparisons with NaN are false, so NaN stays
    x = HIGHEST if low > HIGHEST else low
    shifted = x * LOG2_E + SHIFT
    n = shifted - SHIFT
    r = x - n * LN2_HIGH - n * LN2_LOW
    return (((((C6 * r + C5) * r + C4) * r + C3) * r + HALF) * r * r + r + ONE) * _power_of_two(shifted)


@inlined
def sigmoid(x):
    return ONE / (ONE + exp(-x))


@inlined
def tanh(x):
    """By its series near zero, where the formula would subtract two nearly equal numbers."""
    s = x * x
    series = x * (ONE + s * (T3 + s * (T5 + s * T7)))
    return series if s < NEAR else ONE - TWO / (exp(TWO * x) + ONE)


@inlined
def gelu_tanh(x):
    return tanh(GELU_K * (x + GELU_C * x * x * x))
