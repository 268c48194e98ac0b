"""A reader for untrusted safetensors files: everything in the header is checked against the file before memory is allocated.

    8 bytes   length n of the header, little-endian         n bytes   JSON: name -> dtype, shape, data_offsets
    the rest  the tensors, without gaps or overlaps
Checkpoints of our own runs are read by the package `safetensors`, which maps the file into memory (a file that is truncated
later is a SIGBUS) and accepts a name that occurs twice. Here each failure is an UntrustedFileError with file and tensor.
Tested by: tests/interop/test_tensor_file.py."""

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.errors import UntrustedFileError
from tapeless.interop.untrusted import MEBIBYTE, open_plain, parse_json

MAX_HEADER = 16 * MEBIBYTE  # some 100,000 tensors
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
METADATA, MAX_DIMS = "__metadata__", 8


class Entry(NamedTuple):
    """A tensor in a file, not read yet."""

    file: "TensorFile"
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # in the file
    end: int

    def check_dtype(self) -> None:
        """Of a tensor that will be read; others may have any dtype."""
        if self.dtype not in DTYPES:
            path, known = self.file.path, ", ".join(DTYPES)
            raise UntrustedFileError(f"{path}: {self.name} is {self.dtype!r:.40}; weights must be one of {known}")

    def read(self) -> Tensor:
        """As float32; every value must be finite."""
        self.check_dtype()
        path, file = self.file.path, self.file.open_file
        content = torch.empty(self.end - self.start, dtype=torch.uint8)  # at most the size of the file
        file.seek(self.start)
        if file.readinto(content.numpy()) != len(content):  # type: ignore[attr-defined]
            raise UntrustedFileError(f"{path}: truncated while reading {self.name}")
        tensor = content.view(DTYPES[self.dtype]).view(self.shape).to(torch.float32)
        bad = (~torch.isfinite(tensor)).nonzero()
        if len(bad):
            found = f"{len(bad):,} values that are not finite, the first at {bad[0].tolist()}"
            raise UntrustedFileError(f"{path}: {self.name} {self.shape} has {found}")
        return tensor


class TensorFile:
    """The entries of a file by name. It stays open, so that the file that was checked is the one that is read."""

    def __init__(self, folder: Path, name: str):
        self.path = folder / name
        self.open_file = open_plain(folder, name)
        try:
            self.entries = self._read_header()
        except BaseException:
            self.open_file.close()
            raise

    def _read_header(self) -> dict[str, Entry]:
        size = os.fstat(self.open_file.fileno()).st_size
        length = int.from_bytes(self.open_file.read(8), "little")
        if size < 8 or length > size - 8:
            raise UntrustedFileError(f"{self.path}: truncated: {size:,} bytes, but its header is {length:,}")
        if length > MAX_HEADER:
            raise UntrustedFileError(f"{self.path}: a header of {length:,} bytes; at most {MAX_HEADER:,} are read")
        header = parse_json(self.open_file.read(length), f"{self.path}, header")
        header.pop(METADATA, None)
        entries = {name: self._entry(name, value, 8 + length) for name, value in header.items()}
        self._check_tiling(entries, 8 + length, size)
        return entries

    def _entry(self, name: str, value: Any, data: int) -> Entry:
        if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
            raise UntrustedFileError(f"{self.path}: {name!r:.120} must have dtype, shape and data_offsets, got {value!r:.120}")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or not _nonnegative_ints(shape) or not _nonnegative_ints(offsets) or len(offsets) != 2:
            raise UntrustedFileError(f"{self.path}: {name!r:.120}: invalid dtype, shape or data_offsets: {value!r:.200}")
        if dtype in DTYPES:
            expected = math.prod(shape) * DTYPES[dtype].itemsize
            if offsets[1] - offsets[0] != expected:
                raise UntrustedFileError(
                    f"{self.path}: {name!r:.120}: {dtype} {shape!r:.80} is {expected} bytes, but its data_offsets "
                    f"{offsets} are {offsets[1] - offsets[0]}"
                )
        return Entry(self, name, dtype, tuple(shape), data + offsets[0], data + offsets[1])

    def _check_tiling(self, entries: dict[str, Entry], data: int, size: int) -> None:
        end, before = data, "the header"
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
            if entry.start != end or entry.end < entry.start:
                kind = "overlaps" if entry.start < end else "leaves a gap after"
                raise UntrustedFileError(
                    f"{self.path}: {name!r:.120} {kind} {before!r:.120}: it starts at {entry.start}, not {end}"
                )
            end, before = entry.end, name
        if end != size:
            what = "truncated" if end > size else "longer than its tensors"
            raise UntrustedFileError(f"{self.path}: {what}: {size:,} bytes, {end:,} according to its header")

    def close(self) -> None:
        self.open_file.close()


def _nonnegative_ints(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_DIMS and all(type(x) is int and 0 <= x < 1 << 63 for x in value)
