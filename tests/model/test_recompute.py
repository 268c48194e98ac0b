"""Recomputation: the same bits for less memory, and the memory is known beforehand.

What a forward keeps is measured from outside: the storages of all tensors that are alive after it and were not before."""

import gc
import warnings
from dataclasses import replace

import pytest
import torch

from tapeless.config import ModelConfig
from tapeless.model.memory import saved_bytes
from tapeless.model.transformer import RECOMPUTE, Transformer
from tapeless.verify.fixtures import TRANSFORMER_CASES, B, ModelCase, T, build, data_of, loss_with_gradients
from tapeless.verify.model_judges import by_recompute

CASES = [pytest.param(case, id=case.name) for case in TRANSFORMER_CASES]
WITHIN = 0.01  # of what was predicted


def storages() -> dict[int, int]:  # address -> bytes, of every living tensor
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects complain when looked at
        tensors = [
            x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)
        ]  # isinstance would look behind dead proxies
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def kept_bytes(model: Transformer, case: ModelCase) -> int:
    data = data_of(case)
    before = storages()
    gc.freeze()  # what is there already is not looked through again
    loss_with_gradients(model, *data, backward=False)
    gc.collect()
    after = storages()
    gc.unfreeze()
    return sum(size for address, size in after.items() if address not in before)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_equal_bit_for_bit(case: ModelCase, dtype: str):
    assert [str(finding) for finding in by_recompute(case, dtype) if not finding.ok] == []


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("policy", RECOMPUTE)
@pytest.mark.parametrize("case", CASES)
def test_memory_is_as_predicted(case: ModelCase, policy: str, dtype: str):
    measured = kept_bytes(build(case, dtype, policy), case)
    predicted = sum(saved_bytes(case.config, B, T, policy, dtype).values())
    assert abs(measured / predicted - 1) <= WITHIN, f"predicted {predicted}, measured {measured}"


@pytest.mark.parametrize("policy", RECOMPUTE)
@pytest.mark.parametrize(
    "choices",
    [
        {"num_layers": 1},
        {"num_layers": 5},
        {"norm_placement": "post", "norm": "layer"},
        {"num_kv_heads": 1, "qk_norm": True},
        {"ffn": "relu2", "intermediate_dim": 100},
        {"position": "none"},
        {"head_dim": 2},
    ],
    ids=str,
)
def test_memory_follows_the_shape(choices: dict, policy: str):
    config = replace(ModelConfig(hidden_dim=32, num_heads=4, head_dim=8, intermediate_dim=50, vocab_size=23), **choices)
    measured = kept_bytes(Transformer(config, recompute=policy), TRANSFORMER_CASES[1])
    predicted = sum(saved_bytes(config, B, T, policy, "float32").values())
    assert abs(measured / predicted - 1) <= WITHIN


@pytest.mark.parametrize("case", CASES)
def test_each_policy_keeps_less_than_the_one_before(case: ModelCase):
    none, cheap, full = (sum(saved_bytes(case.config, B, T, policy, "bfloat16").values()) for policy in RECOMPUTE)
    assert none > cheap > full
