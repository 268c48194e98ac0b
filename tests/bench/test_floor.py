"""The floor counts what a step has to do: six flops for each weight and token, and the optimizer's traffic."""

import math

import pytest
import torch
from bench_fixtures import SMALL, task

from tapeless.bench.floor import Floor, flops, matmuls, optimizer_bytes
from tapeless.config import ModelConfig, load_preset, preset_names
from tapeless.model.build import num_params
from tapeless.model.simple_lm import SimpleLM
from tapeless.model.transformer import transformer_specs


@pytest.mark.parametrize("name", preset_names())
def test_every_matrix_that_a_matmul_reads_is_counted(name: str):
    config = load_preset(name)
    if isinstance(config, ModelConfig):
        shapes = {spec.name: spec.shape for spec in transformer_specs(config)}
    else:
        shapes = {key: tuple(w.shape) for key, w in SimpleLM(config).params.items()}
    read = [math.prod(shape) for key, shape in shapes.items() if len(shape) == 2 and key not in ("embed.w", "pos.w")]
    if getattr(config, "tie_embeddings", False):
        read.append(math.prod(shapes["embed.w"]))
    assert flops(config, 10) == 6 * 10 * sum(read)
    assert num_params(config) == sum(map(math.prod, shapes.values()))


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
    for matmul, (x, dy, w, dw, dx, y) in zip(matmuls(SMALL), floor.buffers, strict=True):
        assert tuple(w.shape) == (matmul.layers, matmul.outputs, matmul.inputs)
        torch.testing.assert_close(dw[-1], dy.t() @ x)
        torch.testing.assert_close(dx, dy @ w[-1])
        torch.testing.assert_close(y, x @ w[-1].t())
        assert not dw.isnan().any()
    facts = floor.facts()
    assert facts["products_s"] > 0
    assert facts["optimizer_s"] > 0
