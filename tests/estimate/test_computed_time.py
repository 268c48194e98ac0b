"""The computed time of a step: against measured ones, and what it must depend on."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tapeless.config import ModelConfig, SimpleLMConfig, TrainConfig
from tapeless.config.hardware import GPUS
from tapeless.estimate.computed_time import ERROR, FIXED, NotComputable, computed_time
from tapeless.estimate.target import Target

RESULTS = Path(__file__).parents[2] / "bench" / "results"
MODEL = ModelConfig(num_layers=2, hidden_dim=128, num_heads=2, max_seq_len=64)
TRAIN = TrainConfig(seq_len=64, dtype="bfloat16", device="cuda")


def step(train: TrainConfig = TRAIN, gpu: str = "h200", **options: Any) -> float:
    ops = "triton-fp8" if train.dtype == "fp8" else "triton"
    found = computed_time(MODEL, train, Target(gpu, 0, GPUS[gpu]), options.get("ops", ops), 10)
    assert found["total"] == 10 * found["step"]
    return found["step"]


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_against_a_measured_step(dtype: str):
    measured = json.loads((RESULTS / "cuda-llama-350m.json").read_text())
    row = next(row for row in measured["contenders"] if (row["contender"], row["dtype"]) == ("ours", dtype))
    train = TrainConfig(batch_size=measured["batch_size"], seq_len=measured["seq_len"], dtype=dtype, device="cuda")
    target = Target("h200", 0, GPUS["h200"])
    found = computed_time(ModelConfig(**measured["model"]), train, target, row["facts"]["ops"], 1)
    assert found["step"] == pytest.approx(row["median_s"], rel=ERROR)
    assert "not measured" in found["how"]


def test_what_makes_a_step_longer():
    moving = step() - FIXED
    assert step(replace(TRAIN, recompute="full")) - FIXED > moving
    assert step(gpu="l4") - FIXED > 4 * moving
    one, two, four = (step(replace(TRAIN, grad_accum=k)) for k in (1, 2, 4))
    assert four - two == pytest.approx(2 * (two - one))
    assert two - one < one - FIXED  # the update is made once


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (replace(TRAIN, dtype="float32"), "--dtype bfloat16"),
        (replace(TRAIN, optimizer="muon"), "which muon has not"),
        (replace(TRAIN, freeze="embed.w"), "train all parameters"),
        (replace(TRAIN, init_from="runs/base", lora_rank=8), "train all parameters"),
    ],
)
def test_what_has_no_formula(train: TrainConfig, words: str):
    with pytest.raises(NotComputable, match=words):
        step(train)


def test_a_gpu_and_a_transformer_are_needed():
    with pytest.raises(NotComputable, match="name one"):
        computed_time(MODEL, TRAIN, Target("a GPU with 24GB", 0), "triton", 1)
    with pytest.raises(NotComputable, match="for transformers"):
        computed_time(SimpleLMConfig(), TRAIN, Target("h200", 0, GPUS["h200"]), "reference", 1)
