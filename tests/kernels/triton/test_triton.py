"""The set `triton`: every case of every op by the contract. Without a GPU the kernels run in Triton's interpreter, in float32
alone: the interpreter cuts bfloat16 off where hardware rounds."""

from operator import attrgetter

import pytest
import torch

from contract import check_kernel

pytest.importorskip("triton")

from tapeless.kernels.triton.ops import triton_ops
from tapeless.verify.cases import cases_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = ("float32", "bfloat16") if DEVICE == "cuda" else ("float32",)
OPS = triton_ops()
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, in the interpreter, of exp(100) and of inf - inf
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # the interpreter, of a loop's bounds
]


@pytest.mark.parametrize("case", [case for case in cases_of(OPS, DEVICE) if case.family != "dropout"], ids=attrgetter("name"))
def test_contract(case):
    check_kernel(case, DTYPES)
