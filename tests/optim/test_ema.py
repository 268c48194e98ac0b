"""The average of the weights: what is in it, that nothing of the initial weights is, and that a swap leaves every bit."""

import pytest
import torch
from optim_fixtures import gaps, small_model

from tapeless.model.transformer import Transformer
from tapeless.optim import ema as module
from tapeless.optim.ema import Ema, decay_at


def weights_at(model: Transformer, t: int) -> torch.Tensor:  # (n,)
    generator = torch.Generator().manual_seed(t)
    for w in model.params.values():
        w.copy_(torch.randn(w.shape, generator=generator))
    return model.store.flat.clone()


@pytest.mark.parametrize("decay", [0.3, 0.9, 0.999])
def test_it_is_the_weighted_mean_of_every_step(decay: float):
    model = small_model()
    ema, history = Ema(model.params, decay), []
    for t in range(1, 31):
        history.append(weights_at(model, t))
        ema.update(t)
    expected = torch.zeros_like(ema.average)
    for p, t in zip(history, range(1, 31), strict=True):
        expected = decay_at(t, decay) * expected + (1 - decay_at(t, decay)) * p
    assert ema.average.allclose(expected, rtol=1e-12, atol=1e-14)
    assert not gaps(model, ema.average).any()


def test_nothing_of_the_initial_weights_is_in_it():
    averages = []
    for factor in (1.0, 1e6):
        model = small_model()
        model.store.flat.mul_(factor)
        ema = Ema(model.params, 0.999)
        for t in range(1, 6):
            weights_at(model, t)
            ema.update(t)
        averages.append(ema.average.clone())
    assert averages[0].equal(averages[1])


def test_the_decay_rises_to_the_one_that_was_asked_for():
    decays = [decay_at(t, 0.99) for t in range(1, 2000)]
    assert decays[0] == 0
    assert decays == sorted(decays)
    assert decays[-1] == 0.99
    assert decays.index(0.99) == pytest.approx(9 / (1 - 0.99), rel=0.02)


def test_weights_that_stand_still_are_their_own_average():
    model = small_model("float32")
    ema = Ema(model.params, 0.9999)
    for t in range(1, 50):
        ema.update(t)
    assert ema.average.equal(model.store.flat)
    assert ema.average.dtype == torch.float32


@pytest.mark.parametrize("piece", [7, 2**20])
def test_a_swap_leaves_every_bit_as_it_was(piece: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "SWAPPED", piece)
    model = small_model("float32")
    ema = Ema(model.params, 0.9)
    p = weights_at(model, 1)
    average, version = ema.average.clone(), model.store.version

    def look_and_fail() -> None:
        with ema.as_weights():
            assert model.store.flat.equal(average)
            assert ema.average.equal(p)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        look_and_fail()
    assert model.store.flat.equal(p)
    assert ema.average.equal(average)
    assert model.store.version > version, "a write that nobody counts"


def test_by_name():
    model = small_model()
    ema = Ema(model.params, 0.9)
    assert {name: x.shape for name, x in ema.named().items()} == {name: w.shape for name, w in model.params.items()}
    assert all(x.equal(model.params[name]) for name, x in ema.named().items())
    ema.named()["head.w"].zero_()
    assert not ema.named()["head.w"].any()
