"""Matmuls in fp8. Numbers that fp8 represents are multiplied exactly, so that a wrong scale, a wrong place or a wrong
transpose shows in full; with any others the error is that of rounding to three or two bits of mantissa."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tapeless.kernels.choose import FP8_CAPABILITY
from tapeless.kernels.triton.ffn_down import ffn_down
from tapeless.kernels.triton.fp8_cast import Gradient, as_gradient, gradient_scale, in_columns, in_rows
from tapeless.kernels.triton.fp8_ffn_down import Fp8FFNDownSaved, fp8_ffn_down
from tapeless.kernels.triton.fp8_linear import Fp8LinearSaved, fp8_linear
from tapeless.kernels.triton.fp8_qkv_rope import fp8_qkv_rope
from tapeless.kernels.triton.linear import linear
from tapeless.kernels.triton.qkv_rope import qkv_rope
from tapeless.ops.linear import LINEAR, LinearSaved
from tapeless.verify.finding import distance

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
# Relative, in the L2 norm: of one operand, and of the product of an activation and a weight, or of a gradient and either. The
# interpreter rounds to eight bits more coarsely than hardware does; a wrong formula gives 1.
CUT = 1 if ON_GPU else 4
ROUNDED, FORWARD, BACKWARD = 0.03 * CUT, 0.045 * CUT, 0.07 * CUT


def exact(*shape: int, seed: int = 0) -> Tensor:
    """-1, 0, 1, and further values with two bits of mantissa."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.tensor([-3.0, -2.0, -1.0, 0.0, 0.0, 0.5, 1.0, 2.0])
    return numbers[torch.randint(len(numbers), shape, generator=generator)].to(DEVICE, DTYPE)


def ordinary(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, in the interpreter, of infinities
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # the interpreter, of a condition
    pytest.mark.skipif(ON_GPU and torch.cuda.get_device_capability() < FP8_CAPABILITY, reason="this GPU has no fp8 matmuls"),
]


def test_rows_have_scales_of_their_own():
    x = exact(33, 48) * (2.0 ** torch.arange(-16, 17, device=DEVICE, dtype=DTYPE))[:, None]
    x[5] = 0
    rows = in_rows(x)
    assert torch.equal(rows.values.float() * rows.inverse, x.float())
    assert rows.values.float().abs().max() <= 256
    assert rows.largest == rows.inverse.max()


def test_columns_under_one_scale():
    x = exact(70, 48) * (2.0 ** (torch.arange(70, device=DEVICE, dtype=DTYPE) % 8))[:, None]
    rows = in_rows(x)
    assert torch.equal(in_columns(*rows).float() * rows.largest, x.float().t())


def test_gradients_lie_in_both_orders():
    dy = exact(70, 144) / 2**10
    gradient = as_gradient(dy)
    assert gradient.inverse * gradient_scale(70) == 1
    assert torch.equal(gradient.rows.float() * gradient.inverse, dy.float())
    assert torch.equal(gradient.columns.float() * gradient.inverse, dy.float().t())


def test_gradients_beyond_the_range_are_cut():
    dy = torch.tensor([[1e9, -1e9]], device=DEVICE, dtype=DTYPE)
    assert as_gradient(dy).rows.float().tolist() == [[57344.0, -57344.0]]


def test_ordinary_numbers_are_rounded():
    x = ordinary(64, 96)
    rows = in_rows(x)
    assert 0 < distance(rows.values.float() * rows.inverse, x.float()).l2 < ROUNDED


def test_what_is_not_finite_stays_so():
    x = ordinary(32, 32)
    x[3, 4] = float("inf")
    rows = in_rows(x)
    assert not (rows.values.float() * rows.inverse)[3].isfinite().any()
    assert (rows.values.float() * rows.inverse)[4].isfinite().all()
    assert as_gradient(x).rows[3, 4].float().isnan()
    if ON_GPU:  # the interpreter makes a number of NaN
        x[3, 4] = float("nan")
        assert (in_rows(x).values.float())[3, 4].isnan()
        assert as_gradient(x).columns[4, 3].float().isnan()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_linear_of_exact_numbers_is_exact(bias: bool, overwrite: bool):
    x, w, dy = exact(2, 24, 32), exact(48, 32, seed=1), exact(2, 24, 48, seed=2) / 64
    b = exact(48, seed=3) if bias else None
    dw, truth_dw = torch.ones(2, 48, 32, device=DEVICE, dtype=torch.float32)
    db, truth_db = torch.ones(2, 48, device=DEVICE, dtype=torch.float32) if bias else (None, None)
    if overwrite:
        truth_dw.zero_()
    op = fp8_linear(overwrite=overwrite)
    y, saved = op.forward(x, w, b)
    dx = op.backward(dy, saved, w, b, dw, db)
    truth, truth_saved = LINEAR.forward(x.float(), w.float(), None if b is None else b.float())
    truth_dx = LINEAR.backward(dy.float(), truth_saved, w.float(), b, truth_dw, truth_db)
    assert isinstance(saved, Fp8LinearSaved)
    for claimed, wanted in ((y, truth), (dx, truth_dx)):
        assert torch.equal(claimed, wanted.to(DTYPE))
    assert torch.equal(dw, truth_dw)
    if bias:
        assert torch.equal(db, truth_db)


def test_linear_of_ordinary_numbers():
    x, w, dy = ordinary(64, 128), ordinary(96, 128, seed=1), ordinary(64, 96, seed=2) / 64
    op, dw, truth_dw = fp8_linear(), *torch.zeros(2, 96, 128, device=DEVICE)
    y, saved = op.forward(x, w, None)
    dx = op.backward(dy, saved, w, None, dw, None)
    truth, truth_saved = LINEAR.forward(x.float(), w.float(), None)
    truth_dx = LINEAR.backward(dy.float(), truth_saved, w.float(), None, truth_dw, None)
    assert 0 < distance(y.float(), truth).l2 < FORWARD
    assert 0 < distance(dx.float(), truth_dx).l2 < BACKWARD
    assert 0 < distance(dw, truth_dw).l2 < BACKWARD


@pytest.mark.parametrize(("N", "O", "I"), [(15, 32, 32), (16, 20, 32), (16, 32, 24), (1, 16, 16)])
def test_sizes_that_do_not_fit_stay_in_sixteen_bits(N: int, O: int, I: int):
    x, w, dy = ordinary(N, I), ordinary(O, I, seed=1), ordinary(N, O, seed=2)
    op, plain, dw, plain_dw = fp8_linear(), linear(), *torch.zeros(2, O, I, device=DEVICE)
    y, saved = op.forward(x, w, None)
    dx = op.backward(dy, saved, w, None, dw, None)
    plain_y, plain_saved = plain.forward(x, w, None)
    assert isinstance(saved, LinearSaved)
    assert torch.equal(y, plain_y)
    assert torch.equal(dx, plain.backward(dy, plain_saved, w, None, plain_dw, None))
    assert torch.equal(dw, plain_dw)


@pytest.mark.parametrize("name", sorted(fp8_ffn_down()))
def test_gates(name: str):
    N, C, F = 96, 32, 144
    gated = name in ("swiglu", "geglu")
    gate_up, w, dy = ordinary(N, 2 * F if gated else F), ordinary(C, F, seed=1), ordinary(N, C, seed=2) / N
    found = {}
    for kind, op in (("fp8", fp8_ffn_down()[name]), ("plain", ffn_down()[name])):
        dw, db = torch.zeros(C, F, device=DEVICE), torch.zeros(C, device=DEVICE)
        y, saved = op.forward(gate_up, w, None)
        dgate_up = op.backward(dy, saved, w, None, dw, db)
        if kind == "fp8":
            assert isinstance(saved, Fp8FFNDownSaved)
            assert isinstance(dgate_up, Gradient)
            assert torch.equal(dgate_up.rows.float(), dgate_up.columns.float().t())
            dgate_up = dgate_up.rows.float() * dgate_up.inverse
        found[kind] = {"y": y, "dgate_up": dgate_up, "dw": dw, "db": db}
    for key, bound in {"y": FORWARD, "dgate_up": 1.5 * BACKWARD, "dw": BACKWARD, "db": BACKWARD}.items():
        assert 0 < distance(found["fp8"][key].float(), found["plain"][key].float()).l2 < bound, key


def test_a_gate_of_exact_numbers_is_exact():
    N, C, F = 64, 144, 144
    gate_up, dy = exact(N, F), exact(N, C, seed=1) / 64
    w = torch.eye(F, device=DEVICE, dtype=DTYPE)[torch.randperm(F)] * 2  # so that dh is as exact as dy
    op, dw = fp8_ffn_down()["relu"], torch.zeros(C, F, device=DEVICE)
    y, saved = op.forward(gate_up, w, None)
    dgate_up = op.backward(dy, saved, w, None, dw, None)
    h = gate_up.float().relu()
    assert torch.equal(y.float(), h @ w.float().t())
    assert torch.equal(dgate_up.rows.float() * dgate_up.inverse, (dy.float() @ w.float()) * (gate_up > 0))
    assert torch.equal(dw, dy.float().t() @ h)


@pytest.mark.parametrize("width", [32, 24], ids=["that fits", "that does not fit"])
def test_a_gradient_that_is_fp8_already(width: int):
    x, w, dy = exact(32, width), exact(48, width, seed=1), exact(32, 48, seed=2) / 64
    op, dw, dw_of_bits = fp8_linear(), *torch.zeros(2, 48, width, device=DEVICE)
    _, saved = op.forward(x, w, None)
    assert torch.equal(
        op.backward(as_gradient(dy), saved, w, None, dw_of_bits, None), op.backward(dy, saved, w, None, dw, None)
    )
    assert torch.equal(dw, dw_of_bits)


@pytest.mark.parametrize("theta", [None, 1e4])
def test_heads_without_a_rotation_are_exact_and_with_one_close(theta: float | None):
    B, H, G, T, D = 2, 3, 1, 40, 32
    dq, dk, dv = (exact(B, T, heads, D, seed=seed).transpose(1, 2) / 64 for seed, heads in enumerate((H, G, G)))
    theirs = qkv_rope().backward(dq, dk, dv, None, None, None, None, None, theta=theta)
    ours = fp8_qkv_rope().backward(dq, dk, dv, None, None, None, None, None, theta=theta)
    assert torch.equal(ours.rows.float(), ours.columns.float().t())
    ours = (ours.rows.float() * ours.inverse).view(theirs.shape)
    gap = distance(ours, theirs.float()).l2
    assert gap == 0 if theta is None else 0 < gap < BACKWARD
