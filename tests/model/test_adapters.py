"""Adapters in a model: they begin as nothing, merge into their matrices, and every way through the model has them."""

import pytest
import torch

from tapeless.config import Lora, ModelConfig
from tapeless.generate.engine import generate
from tapeless.model.trained import checkpointed, merged, plain
from tapeless.model.transformer import Transformer
from tapeless.verify.finding import distance
from tapeless.verify.first_batch import first_batch_findings
from tapeless.verify.fixtures import PARTLY_TRAINED_CASES, ModelCase, batch, build, move_off_init
from tapeless.verify.model_judges import check_model

CONFIG = ModelConfig(vocab_size=23, hidden_dim=24, num_layers=2, num_heads=4, intermediate_dim=13, max_seq_len=16)
ADAPTED = [case for case in PARTLY_TRAINED_CASES if case.lora]
MERGED = 1e-5  # of logits in float32, beside the largest of them


@pytest.mark.parametrize("case", PARTLY_TRAINED_CASES, ids=lambda case: case.name)
def test_the_judges_find_nothing(case: ModelCase):
    assert [str(finding) for finding in check_model(case) if not finding.ok] == []


def test_the_judges_see_a_scale_that_is_wrong_in_one_pass(monkeypatch: pytest.MonkeyPatch):
    """The checks can fail: backward with another scale than forward."""
    from tapeless.model import linear

    real = linear.LORA
    wrong = real._replace(backward=lambda *args, scale, **options: real.backward(*args, scale=1.01 * scale, **options))
    monkeypatch.setattr(linear, "LORA", wrong)
    assert any(not finding.ok for finding in check_model(ADAPTED[0]))


@pytest.mark.parametrize("ops", ["reference", "cpu"])
def test_a_new_adapter_changes_nothing(ops: str):
    whole, adapted = Transformer(CONFIG, ops=ops), Transformer(CONFIG, ops=ops, lora=Lora(3, 6.0, "all-linear"))
    assert adapted.loss(*batch()).equal(whole.loss(*batch()))


@pytest.mark.parametrize("case", ADAPTED, ids=lambda case: case.name)
@pytest.mark.parametrize("ops", ["reference", "cpu"])
def test_merged_it_is_the_same_model(case: ModelCase, ops: str):
    assert case.lora is not None
    model = Transformer(case.config, ops=ops, lora=case.lora)
    move_off_init(model, seed=1)
    alone = Transformer(case.config, ops=ops)
    for name, w in merged(plain(model.params), checkpointed(model.params), case.lora.scale).items():
        alone.params[name].copy_(w)
    base = Transformer(case.config, ops=ops)
    for name, w in plain(model.params).items():
        base.params[name].copy_(w)
    tokens = batch()[0]
    assert distance(alone.logits(tokens), model.logits(tokens)).largest < MERGED
    assert distance(base.logits(tokens), model.logits(tokens)).largest > 0.1  # it is not that the adapters do nothing


def test_decoding_has_the_adapters():
    model = Transformer(CONFIG, ops="cpu", lora=Lora(3, 6.0, "all-linear"))
    move_off_init(model, seed=1)
    tokens, cache = batch()[0], model.kv_cache(3, 7)
    step_by_step = torch.cat([model.logits(tokens[:, t : t + 1], kv_cache=cache) for t in range(7)], 1)
    assert distance(step_by_step, model.logits(tokens)).largest < MERGED
    assert generate(model, [1, 2], max_tokens=4)


def test_the_first_batch_is_judged_as_it_trains():
    model = Transformer(CONFIG, lora=Lora(3, 6.0, "all-linear"))
    move_off_init(model, seed=1)
    findings = list(first_batch_findings(model, *batch()))
    assert {finding.tensor for finding in findings} >= model.grads.keys()
    assert [str(finding) for finding in findings if not finding.ok] == []


def test_a_checkpoint_holds_adapters_alone():
    assert checkpointed(build(ADAPTED[0]).params).keys() == build(ADAPTED[0]).grads.keys()
    assert checkpointed(Transformer(CONFIG).params).keys() == Transformer(CONFIG).params.keys()
