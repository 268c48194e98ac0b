"""The set `cpu`: every case of every op by the contract, whole models by the levels, and what holds for a whole step."""

from dataclasses import replace
from operator import attrgetter

import pytest
import torch

from contract import check_kernel, check_within
from tapeless.config import ModelConfig, TrainConfig
from tapeless.kernels.choose import choose
from tapeless.model.transformer import Transformer
from tapeless.optim.adam import AdamW
from tapeless.train.step import optimizer_of, train_step
from tapeless.verify.cases import cases_of
from tapeless.verify.fixtures import Setting
from tapeless.verify.kernel_levels import kernel_levels

pytest.importorskip("numba")

OPS = choose("cpu", torch.device("cpu"), "float32").ops
SMALL = ModelConfig(
    vocab_size=97, hidden_dim=48, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_dim=44, max_seq_len=40
)


@pytest.mark.parametrize("case", list(cases_of(OPS)), ids=attrgetter("name"))
def test_contract(case):
    check_kernel(case)


@pytest.mark.parametrize("level", ["L0", "L2", "L3", "L5", "L6"])
def test_levels(level: str):
    check_within(kernel_levels(Setting("cpu"))[level]())


@pytest.mark.slow
def test_level_of_training():
    check_within(kernel_levels(Setting("cpu"))["L4"]())


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
    apart = model.store.flat_grads.clone()
    model.zero_grads()
    assert torch.equal(model.forward_backward(tokens, targets, num_targets=70), loss)
    assert torch.equal(model.store.flat_grads, apart)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_do_not_change_a_kernels_bits(dtype: str):
    """The kernels' own: products are the library's, which may cut its sums by the number of threads."""
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


def test_the_optimizer_writes_the_copy_that_products_read():
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


def test_generation_equals_the_full_forward():
    model, (tokens, _) = Transformer(SMALL, ops="cpu"), data(rows=2, length=12)
    whole, kv_cache = model.logits(tokens), model.kv_cache(2, 12)
    parts = [model.logits(tokens[:, i : i + n], kv_cache=kv_cache) for i, n in ((0, 5), (5, 1), (6, 1), (7, 5))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-5)
