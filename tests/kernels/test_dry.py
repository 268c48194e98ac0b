"""Dry ops against the kernels themselves: after a dry step the workspace holds the bytes that it holds after a real one."""

import subprocess
import sys
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from tapeless.config import Lora, ModelConfig
from tapeless.estimate.dry_run import LiveBytes
from tapeless.kernels.dry import META, dry_ops
from tapeless.kernels.workspace import Workspace
from tapeless.model.transformer import Transformer
from tapeless.ops.op import CapturedCalls

pytest.importorskip("numba")

SMALL = ModelConfig(
    vocab_size=1000, hidden_dim=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=24, intermediate_dim=112, max_seq_len=96
)
SHAPE = (6, 96)  # every block is larger than workspace.SMALL
MODELS = {
    "llama": SMALL,
    "gpt2": replace(SMALL, norm="layer", norm_bias=True, position="learned", ffn="gelu", ffn_bias=True, attn_bias=True),
    "qwen3": replace(SMALL, qk_norm=True, tie_embeddings=True),
    "post": replace(SMALL, norm="layer", norm_placement="post", position="none", ffn="tanh"),
}


def workspace_of(model: Transformer) -> Workspace:
    return model.ops.linear.forward.keywords["ws"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("recompute", ["none", "cheap", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_dry_step_allocates_what_a_real_one_does(name: str, dtype: str, recompute: str):
    config = MODELS[name]
    real = Transformer(config, ops="cpu", dtype=dtype, recompute=recompute)
    tokens = torch.randint(0, config.vocab_size, SHAPE)
    dry = Transformer(config, device=META, ops="reference", dtype=dtype, recompute=recompute, initialized=False)
    dry_set = dry_ops("cpu")
    assert dry_set is not None
    assert dry_set.workspace is not None
    dry.ops = dry_set.ops
    real.ops, dry.ops = replace(real.ops, capture=None), replace(dry.ops, capture=None)
    for _ in range(2):
        real.forward_backward(tokens, tokens, accumulate=False)
        dry.forward_backward(tokens.to(META), tokens.to(META), num_targets=1, accumulate=False, check=False)
        assert dry_set.workspace.allocated == workspace_of(real).allocated
    assert dry_set.workspace.lent == 0
    real.loss(tokens[:4], tokens[:4])  # of another shape, so that the old blocks are released
    dry.loss(tokens[:4].to(META), tokens[:4].to(META), num_targets=1, check=False)
    assert dry_set.workspace.allocated == workspace_of(real).allocated


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*MODELS, "lora"])
def test_a_dry_capture_owns_what_a_real_one_owns(name: str, dtype: str):
    config, lora = MODELS.get(name, SMALL), Lora(3, 2.0, "all-linear") if name == "lora" else None
    real = Transformer(config, ops="cpu", dtype=dtype, lora=lora)
    dry = Transformer(config, device=META, ops="reference", dtype=dtype, initialized=False, lora=lora)
    dry_set = dry_ops("cpu")
    assert dry_set is not None
    assert dry_set.workspace is not None
    assert real.ops.capture is not None
    dry.ops = dry_set.ops
    tokens = torch.randint(0, config.vocab_size, SHAPE)
    for _ in range(2):
        dry.forward_backward(tokens.to(META), tokens.to(META), num_targets=1, accumulate=False, check=False)
    real.forward_backward(tokens, tokens, num_targets=1, accumulate=False, check=False)
    call = real._context(None)
    _, captured = real.ops.capture(lambda: real._forward_backward(tokens, tokens, call, 1, None, False, False))
    assert isinstance(captured, CapturedCalls)
    assert dry_set.workspace.captured == pytest.approx(captured.nbytes, rel=0.02)


@pytest.mark.parametrize("limit", [2**16, 2**30])
def test_a_dry_capture_references_its_tensors_until_it_owns_too_much(limit: int, monkeypatch: pytest.MonkeyPatch):
    """As a real one does, which therefore raises the peak of a model whose sublayers use plain torch."""
    monkeypatch.setattr(import_module("tapeless.kernels.dry"), "LARGEST_CAPTURE", limit)
    dry_set = dry_ops("cpu")
    assert dry_set is not None
    assert dry_set.workspace is not None
    with LiveBytes() as memory:
        x = torch.empty(100, 100, device=META)

        def run() -> None:
            for _ in range(5):
                x + 1  # freed at once, but for the capture

        assert memory.peak_of(lambda: dry_set.workspace.capture(run)) == (40_000 * (3 if limit == 2**16 else 6))
        assert memory.live == 40_000


@pytest.mark.parametrize("there", [True, False])
def test_what_onednn_allocates_is_counted(there: bool, monkeypatch: pytest.MonkeyPatch):
    """The result and the packed weights of the largest matmul: here of the logits, all rows of the batch at once."""
    for name, value in {"ONEDNN": there, "LEAST": 0, "ROWS": 1}.items():
        monkeypatch.setattr(import_module("tapeless.kernels.cpu.matmul"), name, value)
    dry = Transformer(SMALL, device=META, ops="reference", initialized=False)
    dry_set = dry_ops("cpu")
    assert dry_set is not None
    assert dry_set.workspace is not None
    dry.ops = dry_set.ops
    tokens = torch.empty(SHAPE, dtype=torch.int64, device=META)
    dry.forward_backward(tokens, tokens, num_targets=1, accumulate=False, check=False)
    rows, (V, C) = SHAPE[0] * SHAPE[1], (SMALL.vocab_size, SMALL.hidden_dim)
    assert dry_set.workspace.library == (4 * (rows * V + C * V) if there else 0)


def test_a_block_returns_when_its_last_view_is_freed():
    dry_set = dry_ops("cpu")
    assert dry_set is not None
    ws = dry_set.workspace
    assert ws is not None
    x = ws.empty((100, 200), torch.float32)
    view = x[3:]
    del x
    assert (ws.lent, ws.idle) == (80_000, 0)
    del view
    assert (ws.lent, ws.idle) == (0, 80_000)
    again = ws.empty((200, 100), torch.float32)
    assert (ws.lent, ws.allocated, again.shape) == (80_000, 80_000, (200, 100))


WITHOUT_TRITON = """
import sys
if sys.argv[1] == "hidden":
    sys.modules["triton"] = None
from tapeless.config import ModelConfig, TrainConfig
from tapeless.estimate.dry_run import dry_run, kernel_bytes
model = ModelConfig(num_layers=2, hidden_dim=128, num_heads=2, num_kv_heads=1, max_seq_len=256)
for ops, dtype in (("triton", "bfloat16"), ("triton-fp8", "fp8")):
    train = TrainConfig(batch_size=4, seq_len=256, dtype=dtype, device="cuda")
    print(dry_run(model, train, ops), kernel_bytes(model, train))
try:
    import tapeless.kernels.triton.ops
    print("is here", file=sys.stderr)
except ImportError:
    print("is not here", file=sys.stderr)
"""


def test_launchers_without_triton_allocate_and_move_the_same():
    """And nothing else takes it for installed."""
    pytest.importorskip("triton")
    command = [sys.executable, "-c", WITHOUT_TRITON]
    runs = [subprocess.Popen([*command, word], stdout=-1, stderr=-1, text=True) for word in ("hidden", "shown")]
    (hidden, no), (shown, yes) = (run.communicate() for run in runs)
    assert hidden == shown != ""
    assert (no.strip(), yes.strip()) == ("is not here", "is here")


def test_other_sets_have_no_dry_variant():
    assert dry_ops("reference") is None
