"""Where a step's time goes: kinds of kernels by their names, and the bytes that they cannot avoid."""

import pytest
import torch

from tapeless.bench.kernel_profile import kernel_bytes, kind
from tapeless.bench.report import kernel_rows
from tapeless.config import ModelConfig, TrainConfig
from tapeless.model.build import num_params

CONFIG = ModelConfig(
    vocab_size=64, hidden_dim=16, num_layers=1, num_heads=2, head_dim=8, intermediate_dim=32, tie_embeddings=True
)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("nvjet_tst_192x192_64x3_2x1_v_bz_coopB_TNN", "products"),
        ("cutlass::Kernel2<cutlass_80_tensorop_bf16>", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"),
        ("_attention_forward_kernel", "attention"),
        ("_norm_forward_kernel", "_norm_forward_kernel"),
        ("Memset (Device)", "other"),
    ],
)
def test_kinds(name: str, wanted: str):
    assert kind(name) == wanted


def moved(rows: int, dtype: str) -> dict[str, int]:
    return kernel_bytes(CONFIG, TrainConfig(batch_size=rows, seq_len=10, dtype=dtype))


def test_bytes_grow_with_tokens_and_fp8_has_kernels_of_its_own():
    once, twice = moved(50, "bfloat16"), moved(100, "bfloat16")
    fixed = {"_adam_kernel", "_sums_of_squares_kernel"}
    assert all(once[name] == twice[name] for name in fixed)
    for name in ("_norm_forward_kernel", "_gate_forward_kernel", "_gate_backward_kernel", "_loss_kernel", "_gather_kernel"):
        assert twice[name] / once[name] == pytest.approx(2, rel=0.05), name
    assert once["_gate_forward_kernel"] == 2 * 500 * (64 + 32)
    assert once["_adam_kernel"] == pytest.approx(num_params(CONFIG) * (7 * 4 + 2), rel=0.05)
    assert {"_rows_kernel", "_columns_kernel", "_gradient_kernel"} <= moved(
        80, "fp8"
    ).keys()  # fp8 matmuls need a multiple of 16 rows


def test_rows_of_the_table():
    kernels = {
        "products": {"calls": 3.0, "seconds": 0.006, "bytes": None, "of_copy": None},
        "_adam_kernel": {"calls": 1.0, "seconds": 0.001, "bytes": 2 * 10**9, "of_copy": 0.5},
    }
    profile = {"dtype": "bfloat16", "step_s": 0.01, "gaps_s": 0.003, "copy_bytes_per_s": 4e12, "kernels": kernels}
    assert kernel_rows(profile)[1:] == [
        ("products", "3", "6.000", "60.0%", "", "", ""),
        ("adam_kernel", "1", "1.000", "10.0%", "2.00", "2.00", "50%"),
        ("gaps", "", "3.000", "30.0%", "", "", ""),
        ("a step", "", "10.000", "100.0%", "", "", ""),
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_whole_profile():
    from tapeless.bench.kernel_profile import kernel_profile
    from tapeless.bench.task import Task, measured
    from tapeless.config import TrainConfig

    train = measured(TrainConfig(batch_size=2, device="cuda", dtype="bfloat16"), 16)
    found = kernel_profile(Task("ours", CONFIG, train))
    assert {"products", "_adam_kernel"} <= found["kernels"].keys()
    assert sum(k["seconds"] for k in found["kernels"].values()) > 0
