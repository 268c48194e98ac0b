"""`--dtype auto`: what is faster by a margin, and float32 where there is no bfloat16."""

import pytest
import torch

from tapeless.training import fastest
from tapeless.training.fastest import fastest_dtype


@pytest.mark.parametrize(("narrow", "expected"), [(1.0, "float32"), (0.9, "float32"), (0.5, "bfloat16"), (2.0, "float32")])
def test_what_is_faster_by_a_fifth(monkeypatch: pytest.MonkeyPatch, narrow: float, expected: str):
    monkeypatch.setattr(fastest, "matmul_seconds", lambda dtype, device: 1.0 if dtype == torch.float32 else narrow)
    found = fastest_dtype("cpu")
    assert found.dtype == expected
    assert f"{1e3 * narrow:.2g} ms in bfloat16 and 1e+03 in float32" in found.reason


def test_a_device_without_bfloat16(monkeypatch: pytest.MonkeyPatch):
    def seconds(dtype: torch.dtype, device: str) -> float:
        if dtype == torch.bfloat16:
            raise TypeError("BFloat16 is not supported")
        return 1.0

    monkeypatch.setattr(fastest, "matmul_seconds", seconds)
    assert fastest_dtype("mps") == ("float32", "mps has no bfloat16 matmul")


def test_this_machine():
    assert fastest_dtype("cpu").dtype in ("float32", "bfloat16")
