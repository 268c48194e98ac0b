"""Utilization: the formula on a model counted by hand, and GPUs that are not listed."""

import pytest

from tapeless.bench.summary import utilization
from tapeless.bench.task import Task
from tapeless.config import ModelConfig, TrainConfig
from tapeless.config.hardware import bf16_peak
from tapeless.model.build import step_flops

MODEL = ModelConfig(vocab_size=10, hidden_dim=8, num_layers=2, num_heads=2, intermediate_dim=6, max_seq_len=5)
# for each layer 4 x 8 x 8 of attention and 3 x 6 x 8 of the feed-forward; the head of 10 x 8
WEIGHTS = 2 * (4 * 64 + 3 * 48) + 80


@pytest.mark.parametrize("tied", [False, True])
def test_flops_by_hand(tied: bool):
    """Tied or not, the head's matrix counts once."""
    model = ModelConfig(**{**vars(MODEL), "tie_embeddings": tied})
    task = Task("ours", model, TrainConfig(batch_size=3, seq_len=5))
    assert step_flops(model, 15, 5) == 15 * 6 * (WEIGHTS + 2 * 8 * 5)
    assert utilization(task, 2.0, "NVIDIA H200") == step_flops(model, 15, 5) / 2.0 / 989e12


def test_peaks():
    assert bf16_peak("NVIDIA H100 80GB HBM3") == 989e12
    assert bf16_peak("NVIDIA A100-SXM4-80GB") == 312e12
    assert bf16_peak("NVIDIA GeForce RTX 4090") == 165e12
    others = ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA A100-PCIE-40GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    for unknown in (
        *others,
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce GTX 1080",
        "A1000",
    ):
        assert bf16_peak(unknown) is None
        assert utilization(Task("ours", MODEL, TrainConfig(seq_len=5)), 1.0, unknown) is None
