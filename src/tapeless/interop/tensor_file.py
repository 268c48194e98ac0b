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
    dtype: str
    shape: tuple[int, ...]
    start: int  # in the file
    end: int


class TensorFile:
    """The entries of a file by name. It stays open, so that the file that was checked is the one that is read."""

    def __init__(self, folder: Path, name: str):
        self.path = folder / name
        self._file = open_plain(folder, name)
        try:
            self.entries = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> dict[str, Entry]:
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(8), "little")
        if size < 8 or length > size - 8:
            raise UntrustedFileError(f"{self.path}: truncated: {size:,} bytes, but its header is {length:,}")
        if length > MAX_HEADER:
            raise UntrustedFileError(f"{self.path}: a header of {length:,} bytes; at most {MAX_HEADER:,} are read")
        header = parse_json(self._file.read(length), f"{self.path}, header")
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
        return Entry(dtype, tuple(shape), data + offsets[0], data + offsets[1])

    def _check_tiling(self, entries: dict[str, Entry], data: int, size: int) -> None:
        end, before = data, "the header"
        for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
            if entry.start != end or entry.end < entry.start:
                kind = "overlaps" if entry.start < end else "leaves a gap after"
                raise UntrustedFileError(
                    f"{self.path}: {name!r:.120} {kind} {before!r:.120}: it starts at {entry.start}, not {end}"
                )
            end, before = entry.end, name
        if end != size:
            what = "truncated" if end > size else "longer than its tensors"
            raise UntrustedFileError(f"{self.path}: {what}: {size:,} bytes, {end:,} according to its header")

    def check_dtype(self, name: str) -> None:
        """Of a tensor that will be read; others may have any dtype."""
        entry = self.entries[name]
        if entry.dtype not in DTYPES:
            raise UntrustedFileError(f"{self.path}: {name} is {entry.dtype!r:.40}; weights must be one of {', '.join(DTYPES)}")

    def read(self, name: str) -> Tensor:
        """One tensor as float32; every value must be finite."""
        self.check_dtype(name)
        entry = self.entries[name]
        content = torch.empty(entry.end - entry.start, dtype=torch.uint8)  # at most the size of the file
        self._file.seek(entry.start)
        if self._file.readinto(content.numpy()) != len(content):  # type: ignore[attr-defined]
            raise UntrustedFileError(f"{self.path}: truncated while reading {name}")
        tensor = content.view(DTYPES[entry.dtype]).view(entry.shape).to(torch.float32)
        bad = (~torch.isfinite(tensor)).nonzero()
        if len(bad):
            where = bad[0].tolist()
            raise UntrustedFileError(
                f"{self.path}: {name} {entry.shape} has {len(bad):,} values that are not finite, the first at {where}"
            )
        return tensor

    def close(self) -> None:
        self._file.close()


def _nonnegative_ints(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_DIMS and all(type(x) is int and 0 <= x < 1 << 63 for x in value)
