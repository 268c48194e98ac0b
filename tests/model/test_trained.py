"""What does not train: no gradient, no moments, and not a bit of it changes, whatever the optimizer and the ops."""

import pytest
import torch

from tapeless.config import Lora, ModelConfig, TrainConfig
from tapeless.errors import ConfigError
from tapeless.model.transformer import Transformer
from tapeless.optim import AdamW
from tapeless.training.step import optimizer_of, train_step
from tapeless.verify.fixtures import batch

CONFIG = ModelConfig(vocab_size=23, hidden_dim=24, num_layers=3, num_heads=4, intermediate_dim=13, max_seq_len=16)
PATTERN = "embed*,blocks.0.*,blocks.2.attn.w[qkv],*_norm.w"


def steps(model: Transformer, count: int = 3, **settings: object) -> None:
    train = TrainConfig(weight_decay=0.5, lr=0.01, **settings)  # type: ignore[arg-type]
    optimizer, (tokens, targets) = optimizer_of(model, train), batch()
    for step in range(count):
        train_step(model, optimizer, tokens, targets, lr=0.01, grad_clip=0.1, grad_accum=3, step=step, first_sample=0)


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "muon"])
@pytest.mark.parametrize(("ops", "dtype"), [("reference", "float64"), ("cpu", "float32"), ("cpu", "bfloat16")])
@pytest.mark.parametrize("trains", [{"freeze": PATTERN}, {"lora": Lora(2, 4.0, "all-linear")}], ids=["freeze", "lora"])
def test_what_is_frozen_stays_bit_for_bit(optimizer: str, ops: str, dtype: str, trains: dict):
    model = Transformer(CONFIG, ops=ops, dtype=dtype, **trains)
    before = {name: w.clone() for name, w in model.params.items()}
    steps(model, optimizer=optimizer)
    changed = {name for name, w in model.params.items() if not w.equal(before[name])}
    assert changed == model.grads.keys()


def test_what_trains_goes_as_it_would_alone():
    """One step of plain descent, so that clipping and moments do not mix the two: the gradients are the whole model's."""
    whole, part = Transformer(CONFIG, dtype="float64"), Transformer(CONFIG, dtype="float64", freeze=PATTERN)
    for model in (whole, part):
        model.forward(*batch())
        model.backward()
    assert part.grads.keys() < whole.grads.keys()
    assert all(part.grads[name].equal(whole.grads[name]) for name in part.grads)
    assert part.forward(*batch()).equal(whole.forward(*batch()))


def test_gradients_and_moments_are_of_what_trains_alone():
    model = Transformer(CONFIG, freeze=PATTERN)
    optimizer = optimizer_of(model, TrainConfig())
    assert "blocks.1.attn.wq" in model.grads
    assert not {"embed.w", "blocks.0.ffn.w_down", "blocks.2.attn.wk", "final_norm.w"} & model.grads.keys()
    assert len(model.store.flat_grads) == len(optimizer.state["exp_avg"]) < len(model.store.flat)
    assert optimizer.decay <= model.grads.keys()
    assert len(AdamW(model.params, model.grads).params) == len(model.store.flat_grads)


def test_backward_ends_where_nothing_below_trains():
    model = Transformer(CONFIG, ops="reference", freeze="embed*,blocks.0.*,blocks.1.*")
    _, saved = model._trunk(batch()[0], model._context(None), keep=True)
    assert len(saved.blocks) == 1  # of the others nothing is kept either
    model.forward(*batch())
    model.backward()
    assert all(g.any() for g in model.grads.values())


def test_ranks_are_handed_every_gradient_once():
    model, handed = Transformer(CONFIG, freeze=PATTERN), []
    model.forward(*batch())
    model.backward(on_grads_ready=handed.append)
    assert sum(len(part) for part in handed) == len(model.store.flat_grads)


def test_a_frozen_parameter_that_is_written_by_hand_is_seen_in_bfloat16_too():
    """Between a backward and its update: the optimizer's own copy knows nothing of it."""
    model = Transformer(CONFIG, ops="cpu", dtype="bfloat16", freeze="embed*")
    optimizer, (tokens, targets) = optimizer_of(model, TrainConfig()), batch()
    for _ in range(2):
        model.forward_backward(tokens, targets, accumulate=False)
        model.params["embed.w"].mul_(2)
        if optimizer.step(copy=model.store.copy):
            model.store.mark_copied()
        model.logits(tokens)
        assert model.store.compute_flat.equal(model.store.flat.bfloat16())


@pytest.mark.parametrize(
    ("trains", "says"),
    [
        ({"freeze": "embedding*"}, "no parameter is named 'embedding\\*'"),
        ({"freeze": "*"}, "leaves nothing to train"),
        (
            {"freeze": "*.wq"},
            r"one matmul reads .*wq, .*wk, .*wv as one matrix.*; freeze blocks.0.attn.wk, blocks.0.attn.wv too",
        ),
        ({"freeze": "embed*", "lora": Lora()}, "leave out freeze"),
        ({"lora": Lora(targets="wq,wx")}, "this model has no 'wx'"),
        ({"lora": Lora(targets="all-linear,wq")}, "all-linear cannot be combined"),
        ({"lora": Lora(rank=14, targets="w_up")}, "lora_rank 14 is above the rank"),
        ({"lora": Lora(), "dtype": "fp8"}, "too narrow for 8-bit matmuls"),
    ],
)
def test_mistakes(trains: dict, says: str):
    with pytest.raises(ConfigError, match=says):
        Transformer(CONFIG, **trains)


def test_torchs_own_optimizers_train_it_too():
    model = Transformer(CONFIG, lora=Lora(2, 4.0))
    for name, g in model.grads.items():
        model.params[name].grad = g
    before, still = float(model.forward(*batch())), model.params["embed.w"].clone()
    model.backward()
    torch.optim.SGD([model.params[name] for name in model.grads], lr=1.0).step()
    assert float(model.forward(*batch())) < before
    assert model.params["embed.w"].equal(still)
