"""The sum of gradients over ranks, with threads as ranks: the same bits on any number of them, for every model and optimizer."""

import hashlib
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from rank_threads import on_ranks
from run_fixtures import MODEL, config, dataset

from tapeless.config import ModelConfig
from tapeless.data.prepare import Dataset
from tapeless.dist.gradient_sum import InOrder, gradient_sum
from tapeless.dist.world import ALONE, World
from tapeless.errors import ConfigError
from tapeless.model.build import build_model
from tapeless.training.step import accumulate_gradients
from tapeless.training.trainer import Trainer

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"norm": "layer", "ffn": "gelu", "position": "learned", "attn_bias": True, "ffn_bias": True, "tie_embeddings": True},
    "qwen3": {"num_kv_heads": 1, "qk_norm": True, "tie_embeddings": True},
    "dropout": {"dropout": 0.2},
}
SIZES = (2, 3, 4, 8)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return dataset(tmp_path_factory.mktemp("data"))


def model_of(name: str) -> ModelConfig:
    return replace(MODEL, **MODELS[name])


def trained(world: World, data: Dataset, name: str, **settings: Any) -> tuple[str, list[Any]]:
    """Hash of weights and optimizer state, and what was logged, after a few steps and an evaluation."""
    events: list[dict[str, Any]] = []
    options = config(**({"batch_size": 4, "grad_accum": 2, "micro_batches": 8, "max_steps": 3, "lr": 1e-2} | settings))
    trainer = Trainer(build_model(model_of(name), dtype=options.dtype), options, data, on_event=events.append, world=world)
    assert trainer.run(display=None) == "done"
    found = hashlib.sha256(trainer.model.store.flat.numpy().tobytes())
    for x in trainer.optimizer.state.values():
        found.update(x.numpy().tobytes())
    logged = [
        [event[key] for key in ("step", "loss", "grad_norm", "val_loss") if key in event]
        for event in events
        if event["event"] in ("step", "eval")
    ]
    return found.hexdigest(), logged


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("name", MODELS)
def test_any_number_of_ranks_has_the_same_bits(data: Dataset, name: str, optimizer: str, dtype: str):
    work = partial(trained, data=data, name=name, optimizer=optimizer, dtype=dtype, ema_decay=0.9)
    alone = work(ALONE)
    for size in SIZES:
        assert on_ranks(size, work) == [alone] * size


def test_sums_in_place_agree_but_for_rounding(data: Dataset):
    work = partial(trained, data=data, name="llama", rank_invariant=False)
    (_, expected), ranks = work(ALONE), on_ranks(3, work)
    assert len({found for found, _ in ranks}) == 1
    assert torch.tensor(ranks[0][1][0]).allclose(torch.tensor(expected[0]), rtol=1e-5)


def test_micro_batches_are_added_in_their_order():
    def summed(world: World) -> torch.Tensor:
        total = InOrder(world, len(parts), torch.zeros_like(parts[0]))
        for round_ in range(total.rounds):
            i = round_ * world.size + world.rank
            total.grads.copy_(parts[i] if i < len(parts) else torch.full_like(parts[0], torch.nan))
            total.add(round_)
        total.finish()
        return total.grads

    draw = torch.Generator().manual_seed(0)
    parts = [torch.randn(37, generator=draw) * 10.0**i for i in range(7)]
    parts[0][3] = -0.0
    expected = parts[0].clone()
    for part in parts[1:]:
        part[3] = -0.0
        expected += part
    for found in [summed(ALONE), *on_ranks(2, summed), *on_ranks(3, summed), *on_ranks(5, summed), *on_ranks(7, summed)]:
        assert found.view(torch.int32).equal(expected.view(torch.int32))


def test_the_gradients_are_those_of_one_rank_in_float64(data: Dataset):
    """Against all rows at once: nothing is missing, counted twice or scaled."""

    def gradients(world: World, parts: int) -> torch.Tensor:
        model = build_model(model_of("gpt2"), dtype="float64", ops="reference")
        total = gradient_sum(model.store.flat_grads, parts, world, rank_invariant=True)
        loss = accumulate_gradients(model, tokens, targets, reduction=total, step=0, first_sample=0)
        return torch.cat([model.store.flat_grads, torch.tensor([loss])])

    draw = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, 256, (6, 8), generator=draw) for _ in range(2))
    targets[0, :5] = -100  # micro-batches with different numbers of targets
    expected = gradients(ALONE, 1)
    for found in on_ranks(3, partial(gradients, parts=6)) + on_ranks(4, partial(gradients, parts=6)):
        assert found.allclose(expected, rtol=1e-12, atol=1e-15)


def test_more_ranks_than_micro_batches_are_refused(data: Dataset):
    with pytest.raises(ConfigError, match="3 ranks, but a step has 2 micro-batches"):
        on_ranks(3, lambda world: Trainer(build_model(MODEL), config(micro_batches=2), data, world=world))
    with pytest.raises(ConfigError, match="micro_batches must be a divisor of the 2 rows of a step, got 3"):
        config(micro_batches=3)


def test_ranks_stop_at_the_same_step(data: Dataset):
    def steps(world: World) -> tuple[str, int]:
        trainer = Trainer(
            build_model(MODEL),
            config(micro_batches=2, max_steps=50),
            data,
            world=world,
            stopped=lambda: world.rank == 1 and trainer.steps >= 5,  # only one of them was told
        )
        return trainer.run(display=None), trainer.steps

    assert on_ranks(2, steps) == [("stopped", 5)] * 2


def test_ranks_stop_if_the_command_that_started_them_was_killed(data: Dataset, monkeypatch: pytest.MonkeyPatch):
    def steps(world: World) -> tuple[str, int]:
        trainer = Trainer(build_model(MODEL), config(micro_batches=2, max_steps=50), data, world=world)
        monkeypatch.setattr(world, "abandoned", lambda: world.rank == 1 and trainer.steps >= 5, raising=True)
        return trainer.run(display=None), trainer.steps

    assert on_ranks(2, steps) == [("stopped", 5)] * 2
