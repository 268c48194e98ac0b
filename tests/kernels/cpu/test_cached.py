"""A kernel that was just compiled and the same one from the cache on disk compute the same bits: a run resumed in a new process
goes on as the one that compiled would have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

STEP = """
import hashlib, sys, torch
from tapeless.config import ModelConfig, TrainConfig
from tapeless.model.transformer import Transformer
from tapeless.training.step import optimizer_of, train_step
torch.set_num_threads(1)
config = ModelConfig(vocab_size=97, hidden_dim=48, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_dim=80,
                     max_seq_len=40, qk_norm=True, z_loss=0.01, label_smoothing=0.1, logit_softcap=5.0)
torch.manual_seed(0)
tokens, targets = torch.randint(97, (2, 3, 33))
model = Transformer(config, dtype=sys.argv[1], ops="cpu")
model.forward(tokens, targets)
model.backward()
apart = model.store.flat_grads.clone()
model.zero_grads()
optimizer = optimizer_of(model, TrainConfig())
train_step(model, optimizer, tokens, targets, lr=1e-2, grad_clip=0, grad_accum=1, step=0, first_sample=0)
for found in (apart, model.store.flat_grads, model.store.flat):
    print(hashlib.sha256(found.numpy().tobytes()).hexdigest())
"""


def step(folder: Path, dtype: str) -> list[str]:
    """Hashes of the gradients of forward and backward, of those of both in one, and of the parameters after a step."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder)}
    run = subprocess.run([sys.executable, "-c", STEP, dtype], env=environment, capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_compiled_as_from_the_cache(tmp_path: Path, dtype: str):
    compiled = step(tmp_path, dtype)
    assert list(tmp_path.glob("**/*.kernel"))
    assert step(tmp_path, dtype) == compiled
    apart, both, _ = compiled
    assert apart == both
