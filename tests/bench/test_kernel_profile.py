"""Where a step's time goes: kinds of kernels by their names, and the bytes that they cannot avoid."""

import pytest
import torch

from tapeless.bench.kernel_profile import kernel_bytes, kind
from tapeless.bench.report import kernel_rows
from tapeless.config import ModelConfig

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


def test_bytes_grow_with_tokens_and_fp8_has_kernels_of_its_own():
    once, twice = (kernel_bytes(CONFIG, tokens, fp8=False) for tokens in (10, 20))
    fixed = {name for name in once if once[name] == twice[name]}
    assert fixed == {"_adam_kernel", "_sums_of_squares_kernel"}
    assert all(twice[name] == 2 * once[name] for name in once.keys() - fixed)
    assert once["_gate_forward_kernel"] == 2 * 10 * (64 + 32)
    assert {"_rows_kernel", "_columns_kernel", "_gradient_kernel"} <= kernel_bytes(CONFIG, 10, fp8=True).keys()


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
