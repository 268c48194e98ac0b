"""What all optimizers share: which buffers they take, what decays, and the state by name."""

import re
import sys
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from optim_fixtures import draw_gradients, gaps, small_model

from tapeless.config import TrainConfig
from tapeless.errors import ConfigError
from tapeless.optim import SGD, Adam, AdamW, Muon, make_optimizer
from tapeless.optim.flat import CapturableOptimizer, FlatOptimizer, decayed_spans, flat_buffer

KINDS = [SGD, Adam, AdamW, Muon]
MATRICES = (
    {"embed.w", "head.w"} | {f"blocks.0.attn.w{x}" for x in "qkvo"} | {f"blocks.0.ffn.w_{x}" for x in ("gate", "up", "down")}
)


def test_the_buffer_behind_the_views():
    model = small_model()
    assert flat_buffer(model.params) is model.store.flat
    assert flat_buffer(model.grads) is model.store.flat_grads


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_their_own_are_refused(kind: type[FlatOptimizer]):
    model = small_model()
    copies = {name: w.clone() for name, w in model.params.items()}
    with pytest.raises(ConfigError, match=r"pass model\.params and model\.grads"):
        kind(copies, model.grads)
    mixed = {**model.params, "head.w": small_model().params["head.w"]}
    with pytest.raises(ConfigError, match="one flat buffer"):
        kind(mixed, model.grads)


def test_gradients_of_another_model_are_refused():
    model, buffer = small_model(), torch.zeros(100)
    other = {"embed.w": buffer[:66].view(11, 6)}
    with pytest.raises(ConfigError, match="not of one model"):
        AdamW(model.params, other)


def test_a_name_that_is_no_parameter_is_refused():
    model = small_model()
    with pytest.raises(ConfigError, match=r"'head\.W', which is not a parameter; did you mean 'head\.w'"):
        AdamW(model.params, model.grads, decay=["head.W"])


def test_matrices_decay_by_default_and_norms_and_biases_do_not():
    model = small_model()
    assert SGD(model.params, model.grads).decay == MATRICES
    assert {name for name, spec in model.store.layout.specs.items() if spec.decay} == MATRICES


@pytest.mark.parametrize("decay", [MATRICES, {"head.w"}, {"blocks.0.attn.wk"}, set(), None])
def test_spans_cover_what_decays_and_nothing_else(decay: set[str] | None):
    model = small_model()
    decay = set(model.params) if decay is None else decay
    spans = decayed_spans(model.params, decay)
    covered = torch.zeros(model.store.layout.numel, dtype=torch.int64)
    for span in spans:
        covered[span] += 1
    for name, count in model.store.layout.views(covered).items():
        assert (count == (name in decay)).all(), name
    assert len(spans) <= len(decay)


def test_neighbours_are_one_span():
    model = small_model()
    assert len(decayed_spans(model.params, {f"blocks.0.attn.w{x}" for x in "qkv"})) == 1
    assert len(decayed_spans(model.params, set(model.params))) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_named_decays(kind: type[FlatOptimizer]):
    model = small_model()
    before = {name: w.clone() for name, w in model.params.items()}
    kind(model.params, model.grads, weight_decay=0.1, decay=["blocks.0.attn.wk", "final_norm.w"]).step()
    moved = {name for name, w in model.params.items() if not w.equal(before[name])}
    assert moved == {"blocks.0.attn.wk", "final_norm.w"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_goes_out_by_name_and_comes_back(kind: type[FlatOptimizer]):
    """Into an optimizer of another model, which then takes the very same steps."""
    first, second = small_model(), small_model()
    one, two = (kind(model.params, model.grads, lr=0.01, weight_decay=0.1) for model in (first, second))
    for step in range(5):
        draw_gradients(first, step)
        one.step()
    state = one.named_state()
    for views in state.values():
        assert {name: view.shape for name, view in views.items()} == {name: first.params[name].shape for name in views}
    if kind is not Muon:  # whose matrices and whose rest have a state each: test_muon.py
        assert state.keys() == set(kind.state_names)
        assert all(views.keys() == first.params.keys() for views in state.values())
    for key, views in two.named_state().items():
        for name, view in views.items():
            view.copy_(state[key][name].clone())
    two.t = one.t
    second.store.flat.copy_(first.store.flat)
    for step in range(5, 8):
        for model, optimizer in ((first, one), (second, two)):
            draw_gradients(model, step)
            optimizer.step()
    assert second.store.flat.equal(first.store.flat)
    for key in one.state:
        assert two.state[key].equal(one.state[key])
        assert not gaps(first, one.state[key]).any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rate_given_to_a_step_is_kept(kind: type[FlatOptimizer]):
    first, second = small_model(), small_model()
    one, two = kind(first.params, first.grads, lr=0.5), kind(second.params, second.grads)
    for step, lr in enumerate((None, 0.01, None)):
        draw_gradients(first, step)
        draw_gradients(second, step)
        one.step(lr)
        two.lr = 0.5 if step == 0 else 0.01
        two.step()
    assert one.lr == 0.01
    assert first.store.flat.equal(second.store.flat)
    with pytest.raises(ConfigError, match="lr must be 0 or more"):
        one.step(-1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_argument_is_in_the_signature_and_in_its_docstring(kind: type[FlatOptimizer]):
    parameters = signature(kind).parameters
    assert all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters.values())
    described = " ".join(c.__init__.__doc__ or "" for c in kind.__mro__)
    assert [name for name in parameters if not re.search(rf"\b{name}\b", described)] == []
    assert kind.__doc__ == sys.modules[kind.__module__].__doc__


@pytest.mark.parametrize("option", ["lr", "weight_decay", "beta1", "beta2", "momentum"])
@pytest.mark.parametrize("kind", KINDS)
def test_arguments_out_of_range_are_refused(kind: type[FlatOptimizer], option: str):
    model = small_model()
    if option in signature(kind).parameters:
        with pytest.raises(ConfigError, match=option):
            kind(model.params, model.grads, **{option: -0.1})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_the_same_up_to_rounding(kind: type[FlatOptimizer]):
    wide, narrow = small_model(), small_model("float32")
    for step in range(10):
        for model in (wide, narrow):
            draw_gradients(wide, step)
            model.store.flat_grads.copy_(wide.store.flat_grads)
        if step == 0:
            optimizers = [kind(model.params, model.grads, lr=1e-3) for model in (wide, narrow)]
        for optimizer in optimizers:
            optimizer.step()
    assert narrow.store.flat.allclose(wide.store.flat.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "kind"), [("sgd", SGD), ("adam", Adam), ("adamw", AdamW), ("muon", Muon)])
def test_made_from_a_configuration(name: str, kind: type[FlatOptimizer]):
    model = small_model()
    config = TrainConfig(optimizer=name, lr=0.5, beta1=0.7, beta2=0.8, eps=1e-4, momentum=0.6, nesterov=True, weight_decay=0.2)
    optimizer = make_optimizer(model.params, model.grads, config, ["head.w"])
    assert type(optimizer) is kind
    wanted = {"lr": 0.5, "weight_decay": 0.2, "decay": {"head.w"}}
    wanted |= {"momentum": 0.6, "nesterov": True} if name in ("sgd", "muon") else {}
    wanted |= {"beta1": 0.7, "beta2": 0.8, "eps": 1e-4} if name != "sgd" else {}
    assert {field: getattr(optimizer, field) for field in wanted} == wanted


@pytest.mark.parametrize(
    ("kind", "options"),
    [(SGD, {}), (SGD, {"momentum": 0.9}), (SGD, {"momentum": 0.9, "nesterov": True}), (Adam, {}), (AdamW, {}), (Muon, {})],
)
def test_with_its_numbers_on_the_device_a_step_has_the_same_bits(kind: type[CapturableOptimizer], options: dict[str, object]):
    """With scale NaN, and gradients that are no numbers, nothing changes."""
    models = [small_model(), small_model()]
    plain, captured = (kind(model.params, model.grads, weight_decay=0.1, **options) for model in models)  # type: ignore[call-arg]
    copy = torch.empty_like(captured.params, dtype=torch.bfloat16)
    for t, scale in enumerate((1.0, 0.375, 0.5), start=1):
        draw_gradients(models[0], t)
        captured.grads.copy_(plain.grads)
        held = [captured.params, *captured.state.values()]
        before = [x.clone() for x in held]
        captured.grads[0] = torch.inf
        captured.update_on_device(captured.step_scalars(t), torch.tensor(torch.nan), copy)
        assert all(map(torch.equal, before, held))
        captured.grads.copy_(plain.grads)
        plain.lr = captured.lr = 0.01 * t
        plain.step(scale=scale)
        captured.update_on_device(captured.step_scalars(t), torch.tensor(scale), copy)
        assert all(map(torch.equal, (plain.params, *plain.state.values()), held))
        assert torch.equal(copy, plain.params.bfloat16())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lr", ["0.1", [0.1], True, 1j])
def test_a_rate_that_is_no_number(kind: type[FlatOptimizer], lr: Any):
    model = small_model()
    with pytest.raises(ConfigError, match="lr must be a number, got"):
        kind(model.params, model.grads, lr=lr)
    with pytest.raises(ConfigError, match="lr must be a number, got"):
        kind(model.params, model.grads, lr=np.float32(0.1)).step(lr)
