"""Optimizers by name: the built-in ones, and one registered from outside of the package."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from tapeless.cli.main import main
from tapeless.config import OPTIMIZERS, TrainConfig
from tapeless.optim.flat import FlatOptimizer


class SignDescent(FlatOptimizer):
    """p = p - lr sign(g)"""

    state_names = ("steps",)
    options = ("momentum",)

    def __init__(self, *args: object, momentum: float = 0.0, **options: object):
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.momentum = momentum

    def _update(self) -> None:
        self.t += 1
        self.params.sub_(self.grads.sign(), alpha=self.lr)


@pytest.fixture
def _sign_descent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OPTIMIZERS, "_entries", dict(OPTIMIZERS._entries))
    OPTIMIZERS.register("sign", SignDescent)


@pytest.mark.usefixtures("_sign_descent")
def test_an_optimizer_from_outside_trains_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture):
    run, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    train = ["train", "new", "--preset", "tiny", "--dataset-path", str(text), "--out-dir", str(run), "--device", "cpu"]
    options = ["--seq-len", "16", "--batch-size", "2", "--max-steps", "3", "--lr", "1e-4", "--momentum", "0.5"]
    quick = ["--ops", "reference", "--no-verify", "--report-to", "none", "--sample-tokens", "1"]
    assert main([*train, *options, *quick, "--optimizer", "sign"]) == 0
    assert "sign, momentum 0.5, lr 0.0001" in capsys.readouterr().out
    assert main(["train", "resume", str(run), "--override", "max_steps=4"]) == 0
    assert main([*train, "--optimizer", "sign", "--beta1", "0.5"]) == 2
    assert "beta1 is an option of adamw, adam, muon; sign does not use it" in capsys.readouterr().err


def test_an_unknown_name_is_an_error_with_a_hint():
    with pytest.raises(ValueError, match="'muom'; did you mean 'muon'"):
        TrainConfig(optimizer="muom")


def test_the_fields_marked_as_options_of_optimizers_are_those_that_optimizers_list():
    marked = {f.name for f in fields(TrainConfig) if f.metadata["by_optimizer"]}
    assert marked == {option for name in OPTIMIZERS for option in OPTIMIZERS[name].options}


def test_every_entry_can_be_imported():
    assert all(issubclass(OPTIMIZERS[name], FlatOptimizer) for name in OPTIMIZERS)
    assert {name: OPTIMIZERS[name].__name__.lower() for name in OPTIMIZERS} == {name: name for name in OPTIMIZERS}


def test_the_steps_are_those_of_its_formula():
    flat, grads = torch.ones(4), torch.tensor([1.0, -2.0, 0.0, 3.0])
    SignDescent({"w": flat[:4]}, {"w": grads[:4]}, lr=0.5, weight_decay=0.0, decay=None).step()
    assert flat.tolist() == [0.5, 1.5, 1.0, 0.5]
