"""A safetensors file with an invalid header is refused before memory is allocated."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tapeless.errors import UntrustedFileError
from tapeless.interop.tensor_file import TensorFile

A, B = torch.arange(6.0).reshape(2, 3), torch.tensor([1.5, -2.0], dtype=torch.bfloat16)


def write(folder: Path, header: Any, data: bytes, length: int | None = None) -> None:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "x.safetensors").write_bytes((len(content) if length is None else length).to_bytes(8, "little") + content + data)


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_values_come_back_as_float32(tmp_path: Path):
    save_file({"a": A, "b": B, "c": A.double(), "d": A.half()}, tmp_path / "x.safetensors", {"format": "pt"})
    file = TensorFile(tmp_path, "x.safetensors")
    assert {name: e.shape for name, e in file.entries.items()} == {"a": (2, 3), "b": (2,), "c": (2, 3), "d": (2, 3)}
    assert all(file.entries[name].read().equal(A) for name in "acd")
    assert file.entries["b"].read().equal(B.float())
    file.close()


def test_a_tensor_on_an_odd_byte(tmp_path: Path):
    """The format does not align: a name may be of any length."""
    write(
        tmp_path,
        {"a": entry("BF16", (1,), (0, 2)), "b": entry("F32", (1,), (2, 6))},
        B.view(torch.uint8).numpy().tobytes()[:2] + b"\0\0\x80?",
    )
    file = TensorFile(tmp_path, "x.safetensors")
    assert (file.entries["a"].read().item(), file.entries["b"].read().item()) == (1.5, 1.0)
    file.close()


INVALID: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (lambda f: (f / "x.safetensors").write_bytes(b""), "truncated: 0 bytes"),
    "seven bytes": (lambda f: (f / "x.safetensors").write_bytes(b"\1" * 7), "truncated: 7 bytes"),
    "header beyond the file": (lambda f: write(f, {}, b"", 2**63 - 1), "truncated: 10 bytes, but its header is"),
    "no json": (lambda f: write(f, b"{]", b""), "not JSON"),
    "a list": (lambda f: write(f, [], b""), "expected a JSON object"),
    "a name twice": (lambda f: write(f, b'{"a": {}, "a": {}}', b""), "'a' occurs twice"),
    "truncated": (lambda f: write(f, {"a": entry()}, b"\0" * 7), "truncated: .* bytes, .* according to its header"),
    "bytes behind": (lambda f: write(f, {"a": entry()}, b"\0" * 9), "longer than its tensors"),
    "overlap": (lambda f: write(f, {"a": entry(), "b": entry(offsets=(4, 12))}, b"\0" * 12), "'b' overlaps 'a'"),
    "the same place": (lambda f: write(f, {"a": entry(), "b": entry()}, b"\0" * 8), "'b' overlaps 'a'"),
    "gap": (lambda f: write(f, {"a": entry(), "b": entry(offsets=(12, 20))}, b"\0" * 20), "'b' leaves a gap after 'a'"),
    "backwards": (lambda f: write(f, {"a": entry("I8", (2,), (8, 0))}, b"\0" * 8), "'a' leaves a gap"),
    "a shape of another size": (
        lambda f: write(f, {"a": entry(shape=(3,))}, b"\0" * 8),
        r"F32 \[3\] is 12 bytes, but .* are 8",
    ),
    "a shape beyond memory": (lambda f: write(f, {"a": entry(shape=(2**62, 2**62))}, b"\0" * 8), "bytes, but its data_offsets"),
    "offsets beyond memory": (lambda f: write(f, {"a": entry("I8", (2**62,), (0, 2**62))}, b"\0" * 8), "truncated"),
    "negative": (lambda f: write(f, {"a": entry(shape=(-2, -1))}, b"\0" * 8), "invalid dtype, shape or data_offsets"),
    "floats": (lambda f: write(f, {"a": entry(shape=(2.0,))}, b"\0" * 8), "invalid dtype, shape or data_offsets"),
    "truths": (lambda f: write(f, {"a": entry(shape=(True, 2))}, b"\0" * 8), "invalid dtype, shape or data_offsets"),
    "many axes": (lambda f: write(f, {"a": entry(shape=(1,) * 9)}, b"\0" * 8), "invalid dtype, shape or data_offsets"),
    "three offsets": (lambda f: write(f, {"a": entry(offsets=(0, 4, 8))}, b"\0" * 8), "invalid dtype, shape or data_offsets"),
    "no dtype": (lambda f: write(f, {"a": {"shape": [2], "data_offsets": [0, 8]}}, b"\0" * 8), "must have dtype, shape"),
    "a number": (lambda f: write(f, {"a": 3}, b"\0" * 8), "must have dtype, shape"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_headers_are_refused_before_memory_is_allocated(case: str, tmp_path: Path):
    make, says = INVALID[case]
    make(tmp_path)
    tracemalloc.start()
    with pytest.raises(UntrustedFileError, match=says):
        TensorFile(tmp_path, "x.safetensors")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_an_oversized_header_is_not_read(tmp_path: Path):
    with open(tmp_path / "x.safetensors", "wb") as file:
        file.write((1 << 30).to_bytes(8, "little"))
        file.truncate(1 << 31)
    with pytest.raises(UntrustedFileError, match="a header of 1,073,741,824 bytes"):
        TensorFile(tmp_path, "x.safetensors")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_values_are_reported_with_their_index(value: float, tmp_path: Path):
    bad = A.clone()
    bad[1, 2] = value
    save_file({"a": bad}, tmp_path / "x.safetensors")
    file = TensorFile(tmp_path, "x.safetensors")
    with pytest.raises(UntrustedFileError, match=r"a \(2, 3\) has 1 values that are not finite, the first at \[1, 2\]"):
        file.entries["a"].read()
    file.close()


def test_a_double_too_large_for_float32(tmp_path: Path):
    save_file({"a": torch.tensor([1e300], dtype=torch.float64)}, tmp_path / "x.safetensors")
    file = TensorFile(tmp_path, "x.safetensors")
    with pytest.raises(UntrustedFileError, match="not finite"):
        file.entries["a"].read()
    file.close()


def test_other_dtypes_are_refused_when_read(tmp_path: Path):
    save_file({"a": torch.ones(2, dtype=torch.int64)}, tmp_path / "x.safetensors")
    file = TensorFile(tmp_path, "x.safetensors")
    with pytest.raises(UntrustedFileError, match="a is 'I64'; weights must be one of F64, F32, F16, BF16"):
        file.entries["a"].read()
    file.close()
