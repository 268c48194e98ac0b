"""Conversion to fp8, and the memory layouts of fp8 tensors.

    e4m3   weights and activations: three bits of mantissa, up to 448. Each row is divided by a power of two that brings its
           largest magnitude below 256, found in the same pass; a power of two changes the exponent and rounds nothing.
    e5m2   gradients: two bits of mantissa, the exponents of float16. The gradient of a mean over tokens is of the order
           1 / tokens, so it is multiplied by tokens * 2^8, rounded up to a power of two, and clamped to 57344.
No scale depends on an earlier step: there is no state, and a resumed run computes the same bits.

The tensor cores read both operands along the summed index. x (N, I) and w (O, I) have that layout for y = x w'; dx = dy w needs
the columns of w, and dw = dy' x those of dy and x. From rows with one scale each to columns with a common scale, the largest of
them, only exponents change. NaN stays NaN, and an infinity becomes NaN.
Tested by: tests/kernels/triton/test_fp8.py."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapeless.kernels.triton.launch import contiguous, launch, on_device, warps

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST_E5M2 = tl.constexpr(57344.0)
GRADIENT_SCALE = 2**8  # times the number of tokens
ROWS, COLUMNS, WARPS = 64, 64, 4  # of a tile that is written in both layouts: measured at 32768 x 4096 and 16384 x 11008


class Rows(NamedTuple):
    """e4m3 with a scale per row: values * inverse is the tensor."""

    values: Tensor  # (N, K) e4m3
    inverse: Tensor  # (N, 1) float32, powers of two
    largest: Tensor  # () float32, of the inverses


class Gradient(NamedTuple):
    """e5m2 in both layouts: rows * inverse is the tensor, and columns * inverse its transpose."""

    rows: Tensor  # (N, K) e5m2
    columns: Tensor  # (K, N) e5m2
    inverse: Tensor  # () float32


@triton.jit
def inverse_scale(largest):
    """2^(e-7) where the largest magnitude is in [2^e, 2^(e+1)), so that quotients are below 256; infinite if that is."""
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 64)
    return tl.where(largest == float("inf"), largest, ((exponent - 7) << 23).to(tl.float32, bitcast=True))


@triton.jit
def to_e5m2(v):
    v = v.to(tl.float32)
    v = tl.where(tl.abs(v) == float("inf"), float("nan"), v)  # the conversion would give a finite number
    return tl.clamp(v, -LARGEST_E5M2, LARGEST_E5M2, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e5)


@triton.jit
def store_rows(v, inside, row, N, values, at, inverse, largest):
    """Write a tile of whole rows (ROWS, WIDTH) float32 as e4m3, with the scales of the rows and their maximum."""
    scale = inverse_scale(tl.max(tl.abs(v), 1))  # (ROWS,)
    tl.store(values + at, (v / scale[:, None]).to(tl.float8e4nv), mask=inside)
    tl.store(inverse + row, scale, mask=row < N)
    tl.atomic_max(largest, tl.max(tl.where(row < N, scale, 0.0), 0))


@triton.jit
def store_gradient(v, n, k, inside, N, K, rows, columns):
    """Write a scaled tile (ROWS, COLUMNS) as e5m2 into rows (N, K) and columns (K, N). It is transposed in bfloat16: of a
    transposed tile of bytes, Triton 3.6 loses every fourth one in some kernels."""
    v = v.to(tl.bfloat16)
    tl.store(rows + n.to(tl.int64)[:, None] * K + k[None, :], to_e5m2(v), mask=inside)
    tl.store(columns + k.to(tl.int64)[:, None] * N + n[None, :], to_e5m2(tl.trans(v)), mask=tl.trans(inside))


@triton.jit
def store_columns(v, n, k, inside, N, columns):
    """Write a scaled tile (ROWS, COLUMNS) as e4m3 into columns (K, N)."""
    transposed = tl.trans(v.to(tl.bfloat16)).to(tl.float32)
    tl.store(columns + k.to(tl.int64)[:, None] * N + n[None, :], transposed.to(tl.float8e4nv), mask=tl.trans(inside))


@triton.jit
def _rows_kernel(x, values, inverse, largest, N, K, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # (N, K), (N, K), (N,), ()
    row, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (row < N)[:, None] & (k < K)[None, :]
    at = row.to(tl.int64)[:, None] * K + k[None, :]
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    store_rows(v, inside, row, N, values, at, inverse, largest)


@triton.jit
def _columns_kernel(values, inverse, largest, columns, N, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # columns (K, N)
    n, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (n < N)[:, None] & (k < K)[None, :]
    v = tl.load(values + n.to(tl.int64)[:, None] * K + k[None, :], mask=inside, other=0.0).to(tl.float32)
    v *= (tl.load(inverse + n, mask=n < N, other=0.0) / tl.load(largest))[:, None]
    store_columns(v, n, k, inside, N, columns)


@triton.jit
def _gradient_kernel(x, rows, columns, N, K, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # (N, K), (N, K), (K, N)
    n, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (n < N)[:, None] & (k < K)[None, :]
    v = tl.load(x + n.to(tl.int64)[:, None] * K + k[None, :], mask=inside, other=0.0).to(tl.float32)
    store_gradient(v * scale, n, k, inside, N, K, rows, columns)


def empty_rows(N: int, K: int, device: torch.device) -> Rows:
    inverse = torch.empty(N, 1, dtype=torch.float32, device=device)
    return Rows(torch.empty(N, K, dtype=E4M3, device=device), inverse, torch.zeros((), dtype=torch.float32, device=device))


@on_device
def in_rows(
    x: Tensor,  # (..., K)
) -> Rows:
    K = x.shape[-1]
    N, width = x.numel() // K, triton.next_power_of_2(K)
    made, tile = empty_rows(N, K, x.device), max(1, 4096 // width)
    options: dict[str, Any] = {"ROWS": tile, "WIDTH": width, "num_warps": warps(tile * width)}
    launch(_rows_kernel, (triton.cdiv(N, tile),), contiguous(x), *made, N, K, **options)
    return made


@on_device
def in_columns(
    values: Tensor,  # (N, K) e4m3
    inverse: Tensor,  # (N, 1)
    largest: Tensor,  # ()
) -> Tensor:  # (K, N) e4m3; times `largest` it is the transpose
    N, K = values.shape
    columns = torch.empty(K, N, dtype=E4M3, device=values.device)
    grid = triton.cdiv(N, ROWS), triton.cdiv(K, COLUMNS)
    options: dict[str, Any] = {"ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": WARPS}
    launch(_columns_kernel, grid, values, inverse, largest, columns, N, K, **options)
    return columns


def gradient_scale(N: int) -> float:
    return float(GRADIENT_SCALE * triton.next_power_of_2(N))


@lru_cache
def constant(value: float, device: torch.device) -> Tensor:  # () float32
    """Created once, so that a captured CUDA graph does not contain its creation."""
    return torch.tensor(value, dtype=torch.float32, device=device)


def empty_gradient(N: int, K: int, device: torch.device) -> Gradient:
    rows, columns = (torch.empty(shape, dtype=E5M2, device=device) for shape in ((N, K), (K, N)))
    return Gradient(rows, columns, constant(1 / gradient_scale(N), device))


@on_device
def as_gradient(
    dy: Tensor,  # (..., K)
) -> Gradient:
    K = dy.shape[-1]
    N = dy.numel() // K
    made, grid = empty_gradient(N, K, dy.device), (triton.cdiv(N, ROWS), triton.cdiv(K, COLUMNS))
    options: dict[str, Any] = {"ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": WARPS}
    launch(_gradient_kernel, grid, contiguous(dy), made.rows, made.columns, N, K, gradient_scale(N), **options)
    return made
