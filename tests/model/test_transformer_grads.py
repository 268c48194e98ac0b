"""The whole model's gradients by every oracle: the levels that `gradcheck` and the mutants run, one test for each case."""

from dataclasses import fields, replace

import pytest
import torch

from tapeless.config import ModelConfig, load_preset, preset_names
from tapeless.model.transformer import Transformer
from tapeless.verify.finding import distance
from tapeless.verify.fixtures import (
    MODEL_CASES,
    TRANSFORMER_CASES,
    ModelCase,
    batch,
    build,
    data_of,
    gradients,
    shrunk,
    values,
)
from tapeless.verify.metamorphic import check_metamorphic, op_identities
from tapeless.verify.model_judges import by_accumulation, by_autograd, by_precision, check_model
from tapeless.verify.tolerances import ACCUMULATION

CASES = [pytest.param(case, id=case.name) for case in MODEL_CASES]
NAMED = {case.name: case for case in MODEL_CASES}


def failures(findings):
    found = list(findings)
    assert found
    return [str(finding) for finding in found if not finding.ok]


@pytest.mark.parametrize("case", CASES)
def test_every_oracle_agrees(case: ModelCase):
    assert failures(check_model(case)) == []


@pytest.mark.parametrize("case", CASES)
def test_narrow_dtypes_agree_with_float64(case: ModelCase):
    assert failures(by_precision(case)) == []


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_unequal_micro_batches_add_up_to_the_batch(case: ModelCase, dtype: str):
    assert failures(by_accumulation(case, dtype)) == []


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in TRANSFORMER_CASES])
def test_what_does_not_matter_changes_nothing(case: ModelCase):
    assert failures(check_metamorphic(case)) == []


def test_invariants_of_the_ops():
    assert failures(op_identities()) == []


@pytest.mark.parametrize("name", preset_names())
def test_presets_agree_with_autograd(name: str):
    config = shrunk(load_preset(name))
    case = ModelCase(name, replace(config, num_layers=2) if isinstance(config, ModelConfig) else config)
    data = data_of(case)
    assert failures(by_autograd(case, data, gradients(build(case), data))) == []


def test_the_cases_use_every_choice():
    configs = [case.config for case in TRANSFORMER_CASES]
    for field in fields(ModelConfig):
        if field.name != "init" and field.metadata["choices"]:
            assert {getattr(c, field.name) for c in configs} == set(field.metadata["choices"]), field.name
        elif field.type is bool:
            assert {getattr(c, field.name) for c in configs} == {False, True}, field.name
    assert {c.num_kv_heads for c in configs} == {1, 2, 4}
    assert {c.head_dim == c.hidden_dim / c.num_heads for c in configs} == {False, True}
    for name in ("dropout", "z_loss", "label_smoothing", "logit_softcap"):
        assert any(getattr(c, name) for c in configs), name
    assert any(case.documents for case in TRANSFORMER_CASES)


@pytest.mark.parametrize("heads", [(8, 8, 4), (8, 4, 2), (8, 1, 1), (1, 1, 4)])
def test_shrinking_keeps_the_kind_of_head_sharing(heads: tuple[int, int, int]):
    num_heads, num_kv_heads, expected = heads
    small = shrunk(ModelConfig(num_heads=num_heads, num_kv_heads=num_kv_heads, num_layers=3))
    assert (small.num_kv_heads, small.num_layers, small.hidden_dim) == (expected, 3, 24)


@pytest.mark.parametrize("case", CASES)
def test_fixtures_are_away_from_every_initial_value(case: ModelCase):
    model = build(case)
    for name, w in values(model).items():
        assert (w != 0).all(), name
        assert (w != 1).all(), name
    narrow = values(build(case, "bfloat16"))
    assert all((narrow[name] == w).all() for name, w in values(model).items())


def test_the_batch_is_hostile():
    tokens, targets = batch()
    counts = (targets != -100).sum(1).tolist()
    assert counts == [6, 4, 0]
    assert tokens.unique().numel() < tokens.numel()  # repeats
    assert {0, 22} <= set(tokens.unique().tolist())  # both ends of the vocabulary
    assert len(set(range(23)) - set(tokens.unique().tolist())) >= 7  # unused rows


def test_evaluation_drops_nothing_out():
    config = NAMED["penalties"].config
    model, without = build(NAMED["penalties"]), Transformer(replace(config, dropout=0.0), dtype="float64")
    without.store.flat.copy_(model.store.flat)
    tokens, targets = batch()
    assert torch.equal(model.loss(tokens, targets), without.loss(tokens, targets))
    assert torch.equal(model.logits(tokens), without.logits(tokens))


def test_the_divisor_scales_the_gradients_however_large_it_is():
    model, (tokens, targets) = build(NAMED["llama"]), batch()
    valid = int((targets != -100).sum())
    model.forward(tokens, targets)
    model.backward()
    by_valid = model.store.flat_grads.clone()
    model.zero_grads()
    model.forward(tokens, targets, num_targets=100_000)
    model.backward()
    assert distance(model.store.flat_grads * (100_000 / valid), by_valid).l2 <= ACCUMULATION["float64"]


def test_an_upstream_gradient_is_only_read():
    model, (tokens, _) = build(NAMED["penalties"]), batch()
    dlogits = torch.randn_like(model.logits(tokens, keep=True))
    before = dlogits.clone()
    model.backward(dlogits)
    assert torch.equal(dlogits, before)
