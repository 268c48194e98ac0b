"""The reference ops on a GPU: the same gradients as on the CPU, in every dtype that both have."""

import pytest
import torch

from tapeless.model.transformer import Transformer
from tapeless.verify.finding import distance
from tapeless.verify.fixtures import TRANSFORMER_CASES, ModelCase, build, data_of, loss_with_gradients
from tapeless.verify.tolerances import MODEL_AUTOGRAD, MODEL_BFLOAT16, MODEL_FLOAT32

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
BOUNDS = {"float64": MODEL_AUTOGRAD, "float32": MODEL_FLOAT32, "bfloat16": MODEL_BFLOAT16}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", TRANSFORMER_CASES, ids=lambda case: case.name)
def test_gradients_equal_those_of_the_cpu(case: ModelCase, dtype: str):
    on_cpu = build(case, dtype)
    loss_with_gradients(on_cpu, *data_of(case))
    on_gpu = Transformer(case.config, dtype=dtype, recompute=case.recompute, device="cuda")
    on_gpu.store.flat.copy_(on_cpu.store.flat)
    loss_with_gradients(on_gpu, *(None if x is None else x.cuda() for x in data_of(case)))
    assert distance(on_gpu.store.flat_grads, on_cpu.store.flat_grads).l2 <= BOUNDS[dtype]
