"""Blocks are lent again as soon as no tensor refers to them, and never before."""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch

from tapeless.kernels.workspace import Workspace

SHAPE = (64, 256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_comes_back_when_its_tensor_is_gone(dtype: torch.dtype):
    ws = Workspace()
    x = ws.empty(SHAPE, dtype)
    assert x.shape == SHAPE
    assert x.dtype == dtype
    assert x.is_contiguous()
    place = x.data_ptr()
    y = ws.empty(SHAPE, dtype)
    assert y.data_ptr() != place
    del x
    assert ws.empty(SHAPE, dtype).data_ptr() == place
    assert ws.allocated == 2 * 64 * 256 * dtype.itemsize


def test_a_view_keeps_the_block():
    ws = Workspace()
    x = ws.empty(SHAPE, torch.bfloat16)
    x.fill_(3)
    row, place = x[5].view(16, 16).transpose(0, 1), x.data_ptr()
    as_numpy = ws.empty(SHAPE, torch.float32).fill_(2).numpy()
    del x
    gc.collect()
    for dtype in (torch.float32, torch.bfloat16):
        other = ws.empty(SHAPE, dtype)
        assert other.data_ptr() != place
        other.fill_(7)
    assert (row == 3).all()
    assert (as_numpy == 2).all()


def test_a_block_serves_any_shape_of_its_size():
    ws = Workspace()
    place = ws.empty((32, 512), torch.float32).data_ptr()
    assert ws.empty((16384,), torch.float32).data_ptr() == place
    assert ws.empty((8, 8, 256), torch.float32).data_ptr() == place
    assert ws.empty((32, 513), torch.float32).data_ptr() != place


def test_small_tensors_are_not_kept():
    ws = Workspace()
    assert ws.empty((3, 4), torch.float32).shape == (3, 4)
    assert ws.empty((0, 4), torch.bfloat16).shape == (0, 4)
    assert ws.allocated == 0


def test_a_step_allocates_nothing_after_the_first():
    from tapeless.config import ModelConfig
    from tapeless.model.transformer import Transformer

    model = Transformer(ModelConfig(vocab_size=500, hidden_dim=64, num_heads=2, intermediate_dim=128, num_layers=2), ops="cpu")
    (ws,) = {id(part.keywords["ws"]): part.keywords["ws"] for part in model.ops.linear[:2]}.values()
    model.ops = replace(model.ops, capture=None)
    tokens = torch.randint(500, (4, 128))
    model.forward_backward(tokens, tokens)
    after_one = ws.allocated
    assert after_one > 0
    for _ in range(3):
        model.forward_backward(tokens, tokens)
    assert ws.allocated == after_one


def test_scratch_is_one_array_for_each_name():
    ws = Workspace()
    a = ws.scratch("a", 20, 5)
    assert np.shares_memory(ws.scratch("a", 4, 5), a)
    assert not np.shares_memory(ws.scratch("b", 20, 5), a)
    assert ws.scratch("a", 20, 6).shape == (20, 6)
    assert ws.allocated == 4 * (120 + 100)


def test_sizes_that_are_not_asked_for_any_more_do_not_pile_up():
    ws = Workspace()
    kept = ws.empty((100_000,), torch.float32)
    for size in range(100_000, 200_000, 500):
        ws.empty((size,), torch.float32)
        ws.empty((size,), torch.bfloat16)
    assert ws.allocated < 10 * kept.nbytes
