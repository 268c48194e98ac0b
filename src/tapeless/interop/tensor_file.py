"""A safetensors file, read with distrust: everything its header claims is checked against the file before memory is taken.

    8 bytes   length n of the header, little-endian         n bytes   JSON: name -> dtype, shape, data_offsets
    the rest  the tensors, one behind the other, without gaps, without overlaps
The package `safetensors` checks much of this too; here the checks come before the first allocation, each failure is an error
of ours that says what and where, and a tensor is read on its own, when it is asked for.
Tested by: tests/interop/test_tensor_file.py."""

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.errors import UntrustedFileError
from tapeless.interop.untrusted import MEBIBYTE, open_plain, parse_json

LARGEST_HEADER = 16 * MEBIBYTE  # some 100,000 tensors
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
METADATA, MOST_AXES = "__metadata__", 8


class Entry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    start: int  # in the file
    end: int


class TensorFile:
    """The entries of a file, by name; the file stays open, so that what was checked is what is read."""

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
            raise UntrustedFileError(f"{self.path}: truncated: {size:,} bytes, but its header alone would be {length:,}")
        if length > LARGEST_HEADER:
            raise UntrustedFileError(f"{self.path}: a header of {length:,} bytes; {LARGEST_HEADER:,} are the most that is read")
        claimed = parse_json(self._file.read(length), f"{self.path}, header")
        claimed.pop(METADATA, None)
        entries = {name: self._entry(name, value, 8 + length) for name, value in claimed.items()}
        self._check_tiling(entries, 8 + length, size)
        return entries

    def _entry(self, name: str, value: Any, data: int) -> Entry:
        if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
            raise UntrustedFileError(f"{self.path}: {name!r:.120} must have dtype, shape and data_offsets, got {value!r:.120}")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
            raise UntrustedFileError(f"{self.path}: {name!r:.120}: dtype, shape and data_offsets make no sense: {value!r:.200}")
        if dtype in DTYPES:
            expected = math.prod(shape) * DTYPES[dtype].itemsize
            if offsets[1] - offsets[0] != expected:
                raise UntrustedFileError(
                    f"{self.path}: {name!r:.120}: {dtype} {shape!r:.80} is {expected} bytes, but its data_offsets "
                    f"{offsets} hold {offsets[1] - offsets[0]}"
                )
        return Entry(dtype, tuple(shape), data + offsets[0], data + offsets[1])

    def _check_tiling(self, entries: dict[str, Entry], data: int, size: int) -> None:
        end, before = data, "the header"
        for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
            if entry.start != end or entry.end < entry.start:
                kind = "overlaps" if entry.start < end else "leaves a gap behind"
                raise UntrustedFileError(
                    f"{self.path}: {name!r:.120} {kind} {before!r:.120}: it begins at {entry.start}, not {end}"
                )
            end, before = entry.end, name
        if end != size:
            what = "truncated" if end > size else "longer than its tensors"
            raise UntrustedFileError(f"{self.path}: {what}: {size:,} bytes, its header tells of {end:,}")

    def check_dtype(self, name: str) -> None:
        """Of a tensor that is going to be read: others may be of any, and are left alone."""
        entry = self.entries[name]
        if entry.dtype not in DTYPES:
            raise UntrustedFileError(f"{self.path}: {name} is {entry.dtype!r:.40}; weights are one of {', '.join(DTYPES)}")

    def read(self, name: str) -> Tensor:
        """One tensor as float32, every number finite."""
        self.check_dtype(name)
        entry = self.entries[name]
        content = torch.empty(entry.end - entry.start, dtype=torch.uint8)  # as large as the file's own bytes
        self._file.seek(entry.start)
        if self._file.readinto(content.numpy()) != len(content):  # type: ignore[attr-defined]
            raise UntrustedFileError(f"{self.path}: truncated while it was read, at {name}")
        tensor = content.view(DTYPES[entry.dtype]).view(entry.shape).to(torch.float32)
        bad = (~torch.isfinite(tensor)).nonzero()
        if len(bad):
            where = bad[0].tolist()
            raise UntrustedFileError(
                f"{self.path}: {name} {entry.shape} holds {len(bad):,} values that are not finite, the first at {where}"
            )
        return tensor

    def close(self) -> None:
        self._file.close()


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MOST_AXES and all(type(x) is int and 0 <= x < 1 << 63 for x in value)
