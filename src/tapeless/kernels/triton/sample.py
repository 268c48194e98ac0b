"""One token drawn for each row of logits, on the device. Semantics: generate/sampler.py.

The first kernel cuts rows into blocks: penalty and vocabulary limit, and each block's largest logit. The second has a program
for each row. A filter keeps the logits above a threshold, and of those equal to it the ones with the lowest ids: the threshold
is found by bisection over the values that float32 has, each step a pass over the row, which moves both ends of the interval to
logits that exist. For top-k the blocks' largest logits give a first lower end. Sums are float64, in one order: a draw depends
on its own row alone. Probabilities are float32, so that a draw can differ from the host's where u is within 1e-5 of an edge.
Tested by: tests/kernels/triton/test_sample.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapeless.kernels.triton.launch import contiguous, launch, on_device
from tapeless.ops.op import SlotState

BLOCK, BLOCK_WARPS = 512, 1  # logits of a program of the first kernel
WIDTH, WARPS = 4096, 16  # logits that the second reads at a time
LARGEST = tl.constexpr(2**31 - 1)
BELOW_ONE = tl.constexpr(1 - 2.0**-52)


@triton.jit
def _penalty_kernel(
    logits, slots, numbers, limits, seen, z, tops, V, BLOCK: tl.constexpr
):  # logits (R, V); numbers (slots, 4) float64; limits (slots, 2); seen (slots, V); z (R, V), tops (R, blocks) float32
    """tops is inf where a logit is not finite."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    inside = i < tl.load(limits + slot * 2 + 1)
    x = tl.load(logits + row * V + i, mask=inside, other=float("-inf")).to(tl.float32)
    penalty = tl.load(numbers + slot * 4 + 3).to(tl.float32)
    if penalty != 1.0:
        known = tl.load(seen + slot * V + i, mask=inside, other=0) != 0
        x = tl.where(known, tl.where(x > 0.0, x / penalty, x * penalty), x)
    x += 0.0  # -0 becomes 0: equal logits have equal bits
    tl.store(z + row * V + i, x, mask=i < V)
    top = tl.max(tl.where(x == x, x, float("inf")), 0)
    tl.store(tops + row * tl.num_programs(1) + tl.program_id(1), top)


@triton.jit
def _flipped(bits):
    """The bits of a float32 as an integer of the same order, and back."""
    return tl.where(bits < 0, bits ^ LARGEST, bits)


@triton.jit
def _key(x):
    return _flipped(x.to(tl.int32, bitcast=True)).to(tl.int64)


@triton.jit
def _value(key):
    return _flipped(key.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _mass(x, top, temperature):  # float32 -> float64, 1 for the largest logit
    return tl.exp((x - top) / temperature).to(tl.float64)


@triton.jit
def _threshold(z, V, low, high, need, top, temperature, MASS: tl.constexpr, WIDTH: tl.constexpr):
    """The largest key in [low, high) from which on z (V,) sums up to `need`: counting, or by mass. At `low` it does."""
    while high - low > 1:
        middle = _value(low + (high - low) // 2)
        sums = tl.zeros([WIDTH], tl.float64 if MASS else tl.int32)
        above, below = tl.full([WIDTH], float("inf"), tl.float32), tl.full([WIDTH], float("-inf"), tl.float32)
        for first in range(0, V, WIDTH):
            i = first + tl.arange(0, WIDTH)
            x = tl.load(z + i, mask=i < V, other=float("-inf"))
            inside = x >= middle
            if MASS:
                sums += tl.where(inside, _mass(x, top, temperature), 0.0)
            else:
                sums += inside.to(tl.int32)
            above = tl.minimum(above, tl.where(inside, x, float("inf")))
            below = tl.maximum(below, tl.where(inside, float("-inf"), x))
        reached = tl.sum(sums, 0)
        if reached >= need:
            low = _key(tl.min(above, 0))
            high = tl.where(reached == need, low + 1, high)
        else:
            high = _key(tl.max(below, 0)) + 1
    return low


@triton.jit
def _above(z, V, bound, top, temperature, WIDTH: tl.constexpr):
    """How many of z (V,) are above a bound, and their mass."""
    count, mass = tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.float64)
    for first in range(0, V, WIDTH):
        i = first + tl.arange(0, WIDTH)
        x = tl.load(z + i, mask=i < V, other=float("-inf"))
        count += (x > bound).to(tl.int32)
        mass += tl.where(x > bound, _mass(x, top, temperature), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _kept(z, first, V, bound, ties, before, least, top, temperature, WIDTH: tl.constexpr):
    """The mass of each of WIDTH logits, 0 where a filter drops it, and how many equal the bound. `before` of those, counted
    from id 0, lie before the first."""
    i = first + tl.arange(0, WIDTH)
    x = tl.load(z + i, mask=i < V, other=float("-inf"))
    equal = ((x == bound) & (i < V)).to(tl.int32)
    mass = _mass(x, top, temperature)
    keep = (x > bound) | ((equal != 0) & (before + tl.cumsum(equal, 0) <= ties))
    return tl.where(keep & (mass >= least), mass, 0.0), tl.sum(equal, 0)


@triton.jit
def _draw_kernel(
    z, tops, slots, u, numbers, limits, seen, tokens, positions, drawn, V, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):  # z (R, V), tops (R, blocks); u (R,) float64; tokens, positions (slots,) int64; drawn (R,) int64  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot, j = tl.load(slots + row), tl.arange(0, BLOCKS)
    z, tops = z + row * V, tops + row * blocks
    of_blocks = tl.load(tops + j, mask=j < blocks, other=float("-inf"))
    top = tl.max(of_blocks, 0)
    setting = tl.load(numbers + slot * 4)
    token = tl.full([], -1, tl.int64)
    if (top > float("-inf")) & (top < float("inf")):
        if setting == 0.0:
            first = tl.min(tl.where(of_blocks == top, j, BLOCKS), 0) * BLOCK
            i = first + tl.arange(0, BLOCK)
            x = tl.load(z + i, mask=i < V, other=float("-inf"))
            token = tl.min(tl.where(x == top, i, V), 0).to(tl.int64)
        else:
            temperature = tl.maximum(setting.to(tl.float32), 1e-30)
            top_p, least = tl.load(numbers + slot * 4 + 1), tl.load(numbers + slot * 4 + 2)
            top_k, limit = tl.load(limits + slot * 2), tl.load(limits + slot * 2 + 1)
            lowest, high = _key(tl.full([], float("-inf"), tl.float32)), _key(top) + 1
            low, ties = lowest, V
            if (top_k > 0) & (top_k < limit):
                if top_k <= blocks:
                    low = _threshold(tops, blocks, low, high, top_k, top, temperature, False, BLOCKS)
                low = _threshold(z, V, low, high, top_k, top, temperature, False, WIDTH)
                ties = top_k - _above(z, V, _value(low), top, temperature, WIDTH)[0]
            if top_p < 1.0:
                mass = _above(z, V, _value(low), top, temperature, WIDTH)[1]
                need = top_p * (mass + ties * _mass(_value(low), top, temperature))
                new = _threshold(z, V, low, high, need, top, temperature, True, WIDTH)
                missing = need - _above(z, V, _value(new), top, temperature, WIDTH)[1]
                few = tl.ceil(missing / tl.maximum(_mass(_value(new), top, temperature), 1e-300))
                few = tl.maximum(tl.minimum(few, V), 1.0).to(tl.int32)
                ties = tl.where(new == low, tl.minimum(ties, few), few)
                low = new
            bound = _value(low)
            total, before = tl.full([], 0.0, tl.float64), tl.full([], 0, tl.int32)
            for first in range(0, V, WIDTH):
                mass, equal = _kept(z, first, V, bound, ties, before, least, top, temperature, WIDTH)
                total, before = total + tl.sum(mass, 0), before + equal
            target = tl.minimum(tl.load(u + row), BELOW_ONE) * total
            so_far, before = tl.full([], 0.0, tl.float64), tl.full([], 0, tl.int32)
            for first in range(0, V, WIDTH):
                mass, equal = _kept(z, first, V, bound, ties, before, least, top, temperature, WIDTH)
                after = so_far + tl.sum(mass, 0)
                if (token < 0) & (after > target):
                    i = first + tl.arange(0, WIDTH)
                    here = tl.min(tl.where((mass > 0.0) & (so_far + tl.cumsum(mass, 0) > target), i, LARGEST), 0)
                    # The two sums are not rounded alike: if none is beyond the target, it is the last.
                    last = tl.max(tl.where(mass > 0.0, i, -1), 0)
                    token = tl.minimum(here, last).to(tl.int64)
                so_far, before = after, before + equal
    tl.store(drawn + row, token)
    if token >= 0:
        tl.store(tokens + slot, token)
        tl.store(positions + slot, tl.load(positions + slot) + 1)
        tl.store(seen + slot * V + token, 1)


@on_device
def sample(
    logits: Tensor,  # (R, V)
    slots: Tensor,  # (R,) int64
    u: Tensor,  # (R,) float64
    state: SlotState,
) -> Tensor:  # (R,) int64
    """See OpSet.sampler."""
    (R, V), logits, slots, u = logits.shape, contiguous(logits), contiguous(slots), contiguous(u)
    blocks = triton.cdiv(V, BLOCK)
    z = torch.empty(R, V, dtype=torch.float32, device=logits.device)
    tops = torch.empty(R, blocks, dtype=torch.float32, device=logits.device)
    drawn = torch.empty(R, dtype=torch.int64, device=logits.device)
    numbers, limits, seen, tokens, positions = state
    launch(
        _penalty_kernel, (R, blocks), logits, slots, numbers, limits, seen, z, tops, V, BLOCK=BLOCK, num_warps=BLOCK_WARPS
    )  # fmt: skip
    launch(
        _draw_kernel, (R,), z, tops, slots, u, numbers, limits, seen, tokens, positions, drawn, V, blocks,
        BLOCK=BLOCK, BLOCKS=triton.next_power_of_2(blocks), WIDTH=WIDTH, num_warps=WARPS,
    )  # fmt: skip
    return drawn
