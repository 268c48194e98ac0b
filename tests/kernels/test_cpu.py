"""The set `cpu`: every case of every op by the contract, whole models by the levels, and what holds for a whole step."""

import os
import subprocess
import sys
import threading
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest
import torch

from contract import check_kernel, check_within
from levels.kernels import kernel_levels
from tapeless.config import ModelConfig, TrainConfig
from tapeless.kernels.choose import choose
from tapeless.kernels.cpu import linear, linear_cross_entropy
from tapeless.model.transformer import Transformer
from tapeless.ops.attention import ATTENTION
from tapeless.optim.adamw import AdamW
from tapeless.training.step import optimizer_of, train_step
from tapeless.verify.cases import cases_of
from tapeless.verify.finding import distance
from tapeless.verify.fixtures import Setting
from tapeless.verify.tolerances import KERNEL_FORWARD

pytest.importorskip("numba")

OPS = choose("cpu", torch.device("cpu"), "float32").ops
SMALL = ModelConfig(
    vocab_size=97, hidden_dim=48, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_dim=44, max_seq_len=40
)


@pytest.mark.parametrize("case", list(cases_of(OPS)), ids=attrgetter("name"))
def test_contract(case):
    check_kernel(case)


@pytest.mark.parametrize("level", ["L0", "L2", "L3", "L4", "L5", "L6"])
def test_levels(level: str):
    check_within(kernel_levels(Setting("cpu"))[level]())


def data(rows: int = 3, length: int = 33) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = torch.randint(97, (2, rows, length))
    targets[0, 5] = -100
    return tokens, targets


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"z_loss": 0.01, "label_smoothing": 0.1, "logit_softcap": 5.0}], ids=["plain", "all"])
def test_forward_backward_equals_forward_then_backward(dtype: str, options: dict[str, float]):
    model, (tokens, targets) = Transformer(replace(SMALL, **options), dtype=dtype, ops="cpu"), data()
    loss = model.forward(tokens, targets, num_targets=70)
    model.backward()
    apart = {name: dw.clone() for name, dw in model.grads.items()}
    model.zero_grads()
    assert torch.equal(model.forward_backward(tokens, targets, num_targets=70), loss)
    gaps = {name: (dw - apart[name]).abs().max().item() for name, dw in model.grads.items() if not dw.equal(apart[name])}
    assert not gaps, f"{torch.get_num_threads()} threads: {gaps}"


@pytest.mark.parametrize("ops", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"tie_embeddings": True, "attn_bias": True, "ffn_bias": True}], ids=["plain", "tied"])
def test_fresh_gradients_are_those_of_zeroed_ones(ops: str, dtype: str, options: dict[str, bool]):
    model, (tokens, targets) = Transformer(replace(SMALL, **options), dtype=dtype, ops=ops), data()
    model.forward_backward(tokens, targets)
    expected = model.store.flat_grads.clone()
    model.store.flat_grads.fill_(torch.nan)
    model.forward_backward(tokens, targets, accumulate=False)
    assert torch.equal(model.store.flat_grads, expected)
    model.forward_backward(tokens, targets)
    torch.testing.assert_close(model.store.flat_grads, 2 * expected, rtol=1e-2 if dtype == "bfloat16" else 1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_do_not_change_a_kernels_bits(dtype: str):
    """Of the kernels alone: matmuls are the library's, which may split its sums by the number of threads."""
    import numba

    ops = choose("cpu", torch.device("cpu"), dtype).ops
    x = torch.randn(5, 37, 3 * 64).to(getattr(torch, dtype))
    w, found = torch.randn(3 * 64).to(x.dtype), []
    before = numba.get_num_threads()
    try:
        for threads in (1, numba.config.NUMBA_NUM_THREADS):
            numba.set_num_threads(threads)
            dw = torch.zeros(3 * 64)
            _, n, saved = ops.add_norm["rms"].forward(x, x, w, eps=1e-5)
            dx = ops.add_norm["rms"].backward(x, n, saved, w, dw)
            q, k, v, _ = ops.qkv_rope.forward(x, None, None, num_heads=4, num_kv_heads=4, theta=1e4, eps=1e-5)
            o, attention = ops.attention.forward(q, k, v)
            found.append([n, dx, dw, q, o, *ops.attention.backward(o, attention)])
    finally:
        numba.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_optimizer_writes_the_copy_in_the_compute_dtype():
    model, (tokens, targets) = Transformer(SMALL, dtype="bfloat16", ops="cpu"), data()
    optimizer = optimizer_of(model, TrainConfig())
    assert isinstance(optimizer, AdamW)
    for step in range(3):
        train_step(model, optimizer, tokens, targets, lr=1e-2, grad_clip=0.1, grad_accum=1, step=step, first_sample=0)
        assert torch.equal(model.store.compute_flat, model.store.flat.bfloat16())


def test_a_write_after_a_step_is_seen():
    model, (tokens, targets) = Transformer(SMALL, dtype="bfloat16", ops="cpu"), data()
    train_step(
        model, optimizer_of(model, TrainConfig()), tokens, targets, lr=1e-2, grad_clip=1.0, grad_accum=1, step=0, first_sample=0
    )
    before = model.loss(tokens, targets)
    model.params["embed.w"].mul_(2)
    assert model.loss(tokens, targets) != before


def test_micro_batches_add_up():
    (tokens, targets), grads = data(rows=4), []
    for accum in (1, 2, 4):
        model = Transformer(SMALL, ops="cpu")
        optimizer = optimizer_of(model, TrainConfig())
        train_step(model, optimizer, tokens, targets, lr=0.0, grad_clip=0.0, grad_accum=accum, step=0, first_sample=0)
        grads.append(model.store.flat_grads.clone())
    for other in grads[1:]:
        torch.testing.assert_close(other, grads[0], rtol=1e-5, atol=1e-6)


SQUARE = [(2, 4, 2, 33, 33, 20), (2, 4, 4, 130, 130, 32), (1, 3, 3, 65, 65, 64), (1, 2, 2, 40, 40, 5), (1, 1, 1, 97, 97, 128)]
OBLONG = [(1, 2, 1, 7, 70, 8)]  # more keys than queries, which documents cannot have


@pytest.mark.parametrize(
    ("B", "H", "G", "T", "S", "D", "cut"),
    [*((*shape, False) for shape in SQUARE + OBLONG), *((*shape, True) for shape in SQUARE)],
)
def test_attention_in_bfloat16(B: int, H: int, G: int, T: int, S: int, D: int, cut: bool):
    """Compared with the reference op in bfloat16, at sizes where blocks, pairs and paddings all occur, odd ones too; cut: into
    documents."""
    q, k, v = (torch.randn(B, heads, length, D).bfloat16() for heads, length in ((H, T), (G, S), (G, S)))
    do, documents = torch.randn(B, T, H * D).bfloat16(), (torch.arange(T) // 11).expand(B, T) if cut else None
    found = {}
    for name, op, dtype in (
        ("truth", ATTENTION, torch.float64),
        ("plain", ATTENTION, q.dtype),
        ("ours", OPS.attention, q.dtype),
    ):
        o, saved = op.forward(q.to(dtype), k.to(dtype), v.to(dtype), documents)
        found[name] = [o, *op.backward(do.to(dtype), saved)]
    for truth, plain, ours in zip(*found.values(), strict=True):
        assert distance(ours, truth).l2 <= KERNEL_FORWARD * distance(plain, truth).l2


class Counted:
    def __init__(self, function: Any):
        self.function, self.calls = function, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        return self.function(*args, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_the_head(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Several blocks of rows with a shorter last one, and parts of dw, against all at once."""
    x, w, targets = torch.randn(50, 24).to(dtype), torch.randn(37, 24).to(dtype), torch.randint(37, (50,))
    results = []
    for rows, rounded in ((100, 2**21), (7, 5 * 24)):
        monkeypatch.setattr(linear_cross_entropy, "BLOCK", rows * 37 // 2 + 1)
        monkeypatch.setattr(linear, "ROUNDED", rounded)
        counted = Counted(torch.mm)
        with monkeypatch.context() as patched:
            patched.setattr(torch, "mm", counted)
            dw = torch.zeros(37, 24)
            loss, dx = OPS.linear_cross_entropy.both(x, targets, w, dw)
        results.append((loss, dx.float(), dw, counted.calls))
    (loss, dx, dw, few), (loss_, dx_, dw_, many) = results
    assert few <= 3
    assert many >= 16
    torch.testing.assert_close(loss_, loss)
    torch.testing.assert_close(dx_, dx)
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    assert (dw_ - dw).norm() <= bound * dw.norm()


@pytest.mark.parametrize(("V", "rows"), [(256, 4096), (32000, 512), (50304, 512), (128256, 256), (2**25, 1), (2**27, 1)])
def test_rows_of_logits(V: int, rows: int):
    """Many short ones, enough long ones for fast matmuls, and at least one."""
    assert linear_cross_entropy.rows_of_logits(4096, V) == rows
    assert linear_cross_entropy.rows_of_logits(0, V) == 0


def test_threads_are_torchs():
    import numba

    model, (tokens, targets) = Transformer(SMALL, ops="cpu"), data()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        model.loss(tokens, targets)
        assert numba.get_num_threads() == 1
        seen = []
        thread = threading.Thread(target=lambda: (model.loss(tokens, targets), seen.append(numba.get_num_threads())))
        thread.start()
        thread.join()
        assert seen == [1]
    finally:
        torch.set_num_threads(before)


def test_numba_does_not_change_torchs_threads():
    """In a process of its own: Numba starts its threads once."""
    program = (
        "import torch, tapeless\n"
        "tapeless.Transformer(tapeless.load_preset('tiny'), ops='cpu', initialized=False)\n"
        "print(torch.get_num_threads())"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "2"}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "1"


def test_defaults_of_torch_do_not_matter():
    model, (tokens, targets) = Transformer(SMALL, ops="cpu"), data()
    expected = model.loss(tokens, targets)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(model.forward_backward(tokens, targets), expected)
    finally:
        torch.set_default_dtype(torch.float32)
