"""Tensor files: byte for byte what `safetensors` writes, and read by it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from tapeless.training.checkpoint import DTYPES, tensor_file


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bytes_are_those_of_safetensors(tmp_path: Path, dtype: torch.dtype):
    draw = torch.Generator().manual_seed(0)
    shapes = {"b": (3, 5), "a.w": (7,), "scalar": (), "empty": (0, 4), 'é"\\': (2, 1, 2), "z" * 70: (1,)}
    tensors = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}
    content = b"".join(tensor_file(tensors))
    assert content == save(tensors)
    (tmp_path / "x.safetensors").write_bytes(content)
    again = load_file(tmp_path / "x.safetensors")
    assert all(again[name].equal(x) for name, x in tensors.items())


def test_views_are_written_as_they_read():
    flat = torch.arange(24.0)
    views = {"rows": flat[4:16].view(3, 4), "columns": flat.view(4, 6).t()}
    assert b"".join(tensor_file(views)) == save({name: x.contiguous() for name, x in views.items()})


def test_nothing_is_a_file_too():
    assert b"".join(tensor_file({})) == save({})
