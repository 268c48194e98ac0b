"""Tensors as the bytes of a safetensors file, yielded one after the other, so that a checkpoint is hashed while it is written
and never copied in memory. The package `safetensors` reads them; its own writer hides the operating system's errors.

    length of the header u64 · header, JSON padded with spaces to a multiple of 8 · the tensors, without gaps
Names are sorted, so equal tensors are equal bytes.
Tested by: tests/train/test_written_tensors.py, against `safetensors`."""

import json
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16"}


def tensor_file(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    names = sorted(tensors)
    header, end = {}, 0
    for name in names:
        x = tensors[name]
        start, end = end, end + x.nbytes
        header[name] = {"dtype": DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in names:
        flat = tensors[name].contiguous().cpu().view(-1)  # (n,)
        yield flat.view(torch.uint8).numpy().data
