"""The floor counts what a step has to do: six flops for each weight and token, and the optimizer's traffic."""

import pytest
import torch
from bench_fixtures import SMALL, task

from tapeless.bench.floor import Floor, flops, optimizer_bytes, products
from tapeless.bench.task import num_params
from tapeless.config import load_preset, preset_names
from tapeless.model.build import build_model


@pytest.mark.parametrize("name", preset_names())
def test_every_matrix_that_a_product_reads_is_counted(name: str):
    config = load_preset(name)
    if num_params(config) > 3e7:
        pytest.skip("too large to build here; the same arithmetic as the others")
    model = build_model(config)
    matrices = {key: w for key, w in model.params.items() if w.dim() == 2 and key not in ("embed.w", "pos.w")}
    weights = sum(w.numel() for w in matrices.values())
    if getattr(config, "tie_embeddings", False):
        weights += model.params["embed.w"].numel()
    assert flops(config, 10) == 6 * 10 * weights
    assert num_params(config) == model.num_params


def test_bytes_of_the_optimizer():
    n = num_params(SMALL)
    assert optimizer_bytes(SMALL, "float32") == n * 28  # p, g, m, v read; p, m, v written
    assert optimizer_bytes(SMALL, "bfloat16") == n * 30  # and the copy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_multiplies_every_layer(dtype: str):
    floor = Floor(task("floor", dtype))
    for buffer in floor.buffers:
        buffer.dw.fill_(torch.nan)
    floor.step()
    for product, (x, dy, w, dw, dx, y) in zip(products(SMALL), floor.buffers, strict=True):
        assert tuple(w.shape) == (product.layers, product.outputs, product.inputs)
        torch.testing.assert_close(dw[-1], dy.t() @ x)
        torch.testing.assert_close(dx, dy @ w[-1])
        torch.testing.assert_close(y, x @ w[-1].t())
        assert not dw.isnan().any()
    facts = floor.facts()
    assert facts["products_s"] > 0
    assert facts["optimizer_s"] > 0
