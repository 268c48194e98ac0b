"""Muon: its orthogonal factor by singular values, its steps against torch.optim.Muon, what it takes and what it leaves."""

import math
from types import SimpleNamespace

import pytest
import torch
from optim_fixtures import STEPS, draw_for_both, draw_gradients, gaps, lr_at, small_model, step_both

from levels.muon_reference import TheirMuon, is_hidden, newton_schulz
from tapeless.config import ModelConfig
from tapeless.model.simple_lm import SimpleLM, SimpleLMConfig
from tapeless.model.transformer import Transformer
from tapeless.optim import AdamW, Muon
from tapeless.optim import muon as module
from tapeless.optim.muon import batches, matmul_dtype, orthogonal
from tapeless.verify.tolerances import NEWTON_SCHULZ, OPTIMIZER

HIDDEN = {f"blocks.0.attn.w{x}" for x in "qkvo"} | {f"blocks.0.ffn.w_{x}" for x in ("gate", "up", "down")}


@pytest.mark.parametrize("shape", [(6, 6), (5, 9), (9, 5), (1, 7), (7, 1), (40, 3)])
def test_singular_values_come_near_one_and_their_directions_stay(shape: tuple[int, int]):
    u = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for x, o in zip(u, orthogonal(u), strict=True):
        assert (o - newton_schulz(x)).norm() <= NEWTON_SCHULZ["float64"] * o.norm()
        values, before = torch.linalg.svdvals(o), torch.linalg.svdvals(x) / x.norm()
        assert values.max() < 1.21
        assert values[before > 2e-3].min() > 0.68


def test_the_length_does_not_matter_and_zeros_stay_zeros():
    u = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert orthogonal(1e4 * u).allclose(orthogonal(u), rtol=1e-10)
    assert orthogonal(1e-4 * u).allclose(orthogonal(u), rtol=1e-10)
    assert not orthogonal(0 * u).any()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_every_step_is_that_of_the_textbook(nesterov: bool, weight_decay: float):
    """Matrices by singular values, the rest by torch.optim.AdamW."""
    model = small_model()
    ours = Muon(model.params, model.grads, momentum=0.8, nesterov=nesterov, weight_decay=weight_decay, eps=1e-3)
    start, theirs = ({name: w.clone() for name, w in model.params.items()} for _ in range(2))
    hidden = TheirMuon([w for name, w in theirs.items() if is_hidden(name)], 0.8, nesterov, weight_decay)
    rest = {name: w for name, w in theirs.items() if not is_hidden(name)}
    groups = [
        {"params": [w for w in rest.values() if w.dim() > 1], "weight_decay": weight_decay},
        {"params": [w for w in rest.values() if w.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-3)
    for step in range(STEPS):
        step_both(model, ours, theirs, adamw, step)
        hidden.step(lr_at(step))
    for name, w in theirs.items():
        assert (model.params[name] - w).norm() <= OPTIMIZER * (w - start[name]).norm(), name
    for flat in (model.store.flat, *ours.state.values()):
        assert not gaps(model, flat).any()


@pytest.mark.parametrize("nesterov", [False, True])
def test_torch_has_the_same_up_to_its_bfloat16(nesterov: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "matmul_dtype", lambda p: torch.bfloat16)
    model = small_model("float32")
    ours = Muon(model.params, model.grads, lr=0.01, momentum=0.8, nesterov=nesterov, weight_decay=0.1)
    start, theirs = ({name: w.clone() for name, w in model.params.items() if name in HIDDEN} for _ in range(2))
    judge = torch.optim.Muon(
        theirs.values(), lr=0.01, momentum=0.8, nesterov=nesterov, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(5):
        draw_for_both(model, theirs, step)
        ours.step()
        judge.step()
    for name, w in theirs.items():
        assert (model.params[name] - w).norm() <= NEWTON_SCHULZ["bfloat16"] * (w - start[name]).norm(), name


def test_a_step_has_the_same_size_for_every_shape():
    model = Transformer(ModelConfig(vocab_size=64, hidden_dim=32, num_layers=1, num_heads=4, num_kv_heads=2))
    optimizer = Muon(model.params, model.grads, lr=0.5, weight_decay=0.0)
    before = {name: w.clone() for name, w in model.params.items()}
    model.store.flat_grads.normal_(generator=torch.Generator().manual_seed(0))
    optimizer.step()
    for name in HIDDEN:
        moved = (model.params[name] - before[name]).square().mean().sqrt()
        assert 0.5 * 0.2 * 0.68 < moved < 0.5 * 0.2 * 1.21, name


def test_the_step_of_one_of_three_neighbours_does_not_feel_the_others():
    steps = []
    for factor in (1.0, 100.0):
        model = small_model()
        draw_gradients(model, 0)
        model.grads["blocks.0.attn.wq"].mul_(factor)
        before = model.params["blocks.0.attn.wk"].clone()
        Muon(model.params, model.grads).step()
        steps.append(model.params["blocks.0.attn.wk"] - before)
    assert steps[0].equal(steps[1])


def test_embeddings_head_norms_and_biases_are_left_to_adamw():
    muon, adamw = small_model(), small_model()
    for step in range(3):
        for model in (muon, adamw):
            draw_gradients(model, step)
        if step == 0:
            optimizers = [kind(model.params, model.grads, lr=0.01) for kind, model in ((Muon, muon), (AdamW, adamw))]
        for optimizer in optimizers:
            optimizer.step()
    differ = {name for name, w in muon.params.items() if not w.equal(adamw.params[name])}
    assert differ == HIDDEN
    simple = SimpleLM(SimpleLMConfig(vocab_size=11, hidden_dim=4, intermediate_dim=6))
    assert set(Muon(simple.params, simple.grads).named_state()["momentum"]) == {"hidden.w"}


def test_the_state_is_one_momentum_a_matrix_and_two_moments_of_the_rest():
    model = small_model()
    state = Muon(model.params, model.grads).named_state()
    assert set(state["momentum"]) == HIDDEN
    assert set(state["exp_avg"]) == set(state["exp_avg_sq"]) == set(model.params) - HIDDEN


@pytest.mark.parametrize(("freeze", "kept"), [("embed*,head*,*norm*", {"momentum"}), ("blocks.*", {"exp_avg", "exp_avg_sq"})])
def test_what_has_no_parameter_is_no_part_of_the_state(freeze: str, kept: set[str]):
    """A checkpoint could not hold it, and a resume would miss it."""
    config = ModelConfig(vocab_size=7, hidden_dim=4, num_layers=1, num_heads=1, intermediate_dim=3, max_seq_len=4)
    model = Transformer(config, freeze=freeze, ops="reference")
    optimizer = Muon(model.params, model.grads)
    optimizer.step()
    assert set(optimizer.named_state()) == kept


def test_the_factor_of_clipping_does_not_change_the_direction_of_a_first_step():
    moved = []
    for scale in (1.0, 0.125):
        model = small_model()
        draw_gradients(model, 0)
        before = {name: model.params[name].clone() for name in HIDDEN}
        assert Muon(model.params, model.grads).step(scale=scale, copy=torch.empty(1)) is False
        moved.append({name: model.params[name] - w for name, w in before.items()})
    assert all(moved[0][name].allclose(moved[1][name], rtol=1e-10) for name in HIDDEN)


def test_batches_are_of_one_shape_hold_every_matrix_once_and_end_at_the_limit(monkeypatch: pytest.MonkeyPatch):
    model = Transformer(ModelConfig(vocab_size=64, hidden_dim=8, num_layers=5, num_heads=2, intermediate_dim=12))
    matrices = {name: w for name, w in model.params.items() if is_hidden(name)}
    monkeypatch.setattr(module, "TOGETHER", 3 * 64)
    found = list(batches(matrices))
    assert sorted(name for names in found for name in names) == sorted(matrices)
    assert all(len({matrices[name].shape for name in names}) == 1 for names in found)
    assert [len(names) for names in found if matrices[names[0]].shape == (8, 8)] == [3] * 6 + [2]
    whole = Muon(model.params, model.grads, lr=0.01)
    monkeypatch.undo()
    other = Transformer(model.config)
    together = Muon(other.params, other.grads, lr=0.01)
    for each, optimizer in ((model, whole), (other, together)):
        each.store.flat_grads.normal_(generator=torch.Generator().manual_seed(0))
        optimizer.step()
    assert model.store.flat.allclose(other.store.flat, rtol=1e-5, atol=1e-6)


def test_products_are_in_bfloat16_where_they_are_fast():
    found = {
        (device, dtype): matmul_dtype(SimpleNamespace(device=torch.device(device), dtype=dtype))  # type: ignore[arg-type]
        for device in ("cpu", "cuda", "mps")
        for dtype in (torch.float32, torch.float64)
    }
    assert {key: value for key, value in found.items() if value != key[1]} == {("cuda", torch.float32): torch.bfloat16}


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_with_the_kernel_of_adamw_for_the_rest(scale: float):
    pytest.importorskip("numba")
    config = ModelConfig(vocab_size=300, hidden_dim=64, num_layers=2, num_heads=2, intermediate_dim=100)
    models = [Transformer(config, ops=ops) for ops in ("cpu", "reference")]
    kernel, plain = (Muon(model.params, model.grads, lr=1e-2, fused=model.ops.adam_update) for model in models)
    assert kernel.fused is not None
    assert plain.fused is None
    start = models[0].store.flat.clone()
    for step in range(4):
        for model in models:
            draw_gradients(model, step)
        for optimizer in (kernel, plain):
            optimizer.step(scale=scale)
    for name, w in models[1].params.items():
        moved = (w - start[w.storage_offset() :][: w.numel()].view(w.shape)).norm()
        assert (models[0].params[name] - w).norm() <= 1e-5 * moved, name
    assert math.isclose(kernel.t, 4)
