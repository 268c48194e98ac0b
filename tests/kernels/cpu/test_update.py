"""Adam's pass and the norm, against optim/ and against float64."""

import pytest
import torch

pytest.importorskip("numba")

from tapeless.config import ModelConfig
from tapeless.kernels.cpu.update import adam_update, grad_norm
from tapeless.model.transformer import Transformer
from tapeless.optim.adamw import PIECE, AdamW, pieces

CONFIG = ModelConfig(vocab_size=300, hidden_dim=64, num_layers=2, num_heads=2, intermediate_dim=100)


@pytest.mark.parametrize("decay", [None, {"blocks.0.attn.wq", "embed.w"}, set()], ids=["matrices", "two", "none"])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_adam_equals_the_plain_passes(decay: set[str] | None, scale: float):
    models = [Transformer(CONFIG, dtype="bfloat16", ops=ops) for ops in ("cpu", "reference")]
    kernel, plain = (AdamW(model.params, model.grads, lr=1e-2, decay=decay, fused=model.ops.adam_update) for model in models)
    start = models[0].store.flat.clone()
    for step in range(5):
        grads = torch.randn(models[0].store.flat.shape, generator=torch.Generator().manual_seed(step))
        for model in models:
            for name, (first, size) in model.store.layout.spans.items():
                model.grads[name].view(-1).copy_(grads[first : first + size])
        version = models[0].store.version
        kernel.step(scale=scale, copy=models[0].store.copy)
        plain.step(scale=scale, copy=models[1].store.copy)
        assert models[0].store.version > version, "a write that torch does not count"
    moved = (models[1].store.flat - start).norm()
    assert (models[0].store.flat - models[1].store.flat).norm() <= 1e-5 * moved
    for name in kernel.state:
        assert (kernel.state[name] - plain.state[name]).norm() <= 1e-6 * plain.state[name].norm()
    assert torch.equal(models[0].store.compute_flat, models[0].store.flat.bfloat16())
    assert kernel.t == plain.t == 5


@pytest.mark.parametrize("size", [1, 5, 2**14, 2**14 + 1, 300_000])
def test_norm(size: int):
    x = torch.randn(size)
    torch.testing.assert_close(grad_norm(x), x.double().norm(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_norm_of_the_broken(bad: float):
    x = torch.randn(40_000)
    x[33_333] = bad
    assert not torch.isfinite(grad_norm(x))


def test_pieces_cover_everything_once():
    table = pieces([slice(10, 20), slice(64, 64 + 3 * PIECE + 1)], [slice(0, 10 * PIECE)])
    ends = [0, *table[:, 1].tolist()]
    assert table[:, 0].tolist() == ends[:-1]
    assert ends[-1] == 10 * PIECE
    assert (table[:, 1] - table[:, 0]).max() <= PIECE
    decayed = torch.cat([torch.full((last - first,), decays) for first, last, decays in table.tolist()])
    assert decayed.sum() == 10 + 3 * PIECE + 1
    assert decayed[10:20].all()
    assert decayed[64 : 64 + 3 * PIECE + 1].all()


def test_without_a_copy():
    p, g, m, v = (torch.rand(1000) for _ in range(4))
    before = p.clone()
    numbers = torch.tensor([1.0, 0.1, 0.1, 0.95, 0.05, 1.0, 1e-8])
    adam_update(p, g, m, v, None, pieces([], [slice(0, 1000)]), numbers, torch.ones(()))
    assert (p < before).all()
