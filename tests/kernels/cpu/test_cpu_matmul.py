"""Matmuls by either library: correct, repeatable, propagating NaN; and which library is chosen."""

from operator import attrgetter

import pytest
import torch

pytest.importorskip("numba")

from contract import check_kernel
from tapeless.kernels.choose import choose
from tapeless.kernels.cpu import matmul as module
from tapeless.kernels.cpu.matmul import matmul
from tapeless.verify.cases import cases_of

OPS = choose("cpu", torch.device("cpu"), "float32").ops
WITH_MATMULS = [case for case in cases_of(OPS) if case.name.startswith(("linear", "ffn_down"))]
THERE = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no entry point to oneDNN")


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matmul in float32 by oneDNN, whatever the machine and the size."""
    monkeypatch.setattr(module, "ONEDNN", True)
    monkeypatch.setattr(module, "LEAST", 0)
    monkeypatch.setattr(module, "ROWS", 1)


@THERE
@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("case", WITH_MATMULS, ids=attrgetter("name"))
def test_contract(case):
    check_kernel(case, ["float32"])


@THERE
@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (7, 33, 65), (130, 512, 70), (1, 300, 5)], ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["plain", "transposed"])
def test_a_matmul(sizes: tuple[int, int, int], turned: bool, bias: bool):
    M, K, N = sizes
    a, b = torch.randn(M, K + 3)[:, :K], torch.randn(N, K).t() if turned else torch.randn(K, N)
    c = torch.randn(N) if bias else None
    out, again = torch.full((M, N), torch.nan), torch.full((M, N), torch.nan)
    matmul(a, b, out, c)
    matmul(a, b, again, c)
    assert torch.equal(out, again)
    size, shift = a.double().abs() @ b.double().abs(), torch.zeros(N) if c is None else c
    error = (out.double() - a.double() @ b.double() - shift.double()).abs()
    assert (error <= (K + 1) * 2**-24 * (size + shift.double().abs())).all()  # whatever the order of the sum


@THERE
@pytest.mark.usefixtures("onednn")
def test_nan_is_propagated():
    a, out = torch.randn(5, 40), torch.empty(5, 30)
    a[2, 7] = torch.nan
    matmul(a, torch.zeros(40, 30), out)
    assert out[2].isnan().all()
    assert not out[[0, 1, 3, 4]].isnan().any()


@pytest.mark.parametrize(
    ("dtype", "changed"),
    [
        (torch.bfloat16, {}),
        (torch.float32, {"LEAST": 8 * 16 * 24 + 1}),
        (torch.float32, {"LARGEST": 8 * 24 * 4 - 1}),
        (torch.float32, {"ROWS": 5}),
        (torch.float32, {"ONEDNN": False}),
    ],
    ids=["bfloat16", "small", "large", "odd rows", "elsewhere"],
)
@pytest.mark.usefixtures("onednn")
def test_what_is_left_to_torch(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, changed: dict[str, int]):
    for name, value in changed.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(torch.Tensor, "copy_", None)  # the other way ends with one
    a, b, out = torch.randn(8, 16, dtype=dtype), torch.randn(16, 24, dtype=dtype), torch.empty(8, 24, dtype=dtype)
    matmul(a, b, out)
    assert torch.equal(out, a @ b)


@pytest.mark.usefixtures("onednn")
def test_a_bias_with_gaps():
    a, b, c, out = torch.randn(8, 16), torch.randn(16, 24), torch.randn(48)[::2], torch.empty(8, 24)
    matmul(a, b, out, c)
    assert torch.equal(out, torch.addmm(c, a, b))
