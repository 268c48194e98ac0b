"""Batches and learning rates of the caller's own: what is trained on, exact resumes, and what cannot be resumed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_fixtures import MODEL, dataset, events, final_bytes, text_file
from torch import Tensor

from tapeless import STOP, Trainer, resume, train
from tapeless.cli.main import main
from tapeless.config import TrainConfig
from tapeless.data.files import file_sha256
from tapeless.errors import ConfigError, InputError, NonFiniteError
from tapeless.model.build import build_model
from tapeless.training.run_dir import RunDir

FEW: dict[str, Any] = {
    "batch_size": 2,
    "max_steps": 6,
    "eval_every": 3,
    "save_every": 2,
    "sample_tokens": 4,
    "verify": False,
    "display": None,
    "report_to": "none",
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(step))
    return x[:, :-1], x[:, 1:]


def rate(step: int) -> float:
    return 1e-2 / (1 + step)


def stop_at(step: int) -> Any:
    return lambda event: STOP if event["event"] == "step" and event["step"] == step else None


@pytest.fixture
def text(tmp_path: Path) -> str:
    return text_file(tmp_path, 700)


def test_the_step_is_taken_with_what_the_functions_give(tmp_path: Path):
    """As by hand with the same batches and rates."""
    trained = build_model(MODEL)
    trainer = Trainer(trained, TrainConfig(batch_size=2), dataset(tmp_path), batches=batch)
    metrics = [trainer.step(*trainer.next_batch()) for _ in range(3)]
    by_hand = build_model(MODEL)
    other = Trainer(by_hand, trainer.config, trainer.data)
    assert [other.step(*batch(step)).loss for step in range(3)] == [m.loss for m in metrics]
    assert torch.equal(trained.store.flat, by_hand.store.flat)
    rated = Trainer(build_model(MODEL), trainer.config, trainer.data, lr_schedule=lambda step: np.float32(rate(step)))
    assert [rated.step(*rated.next_batch()).lr for _ in range(3)] == [np.float32(rate(step)) for step in range(3)]


class Epochs:
    """A list whose second pass has another order, by its number alone."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes += 1
        return iter([batch(4 * self.passes + i) for i in range(4)])


@pytest.mark.parametrize(
    "make", [lambda: batch, lambda: [batch(0), batch(1), batch(2), batch(3)], lambda: map(batch, range(9)), Epochs]
)
def test_a_stopped_run_resumes_to_the_same_bits(tmp_path: Path, text: str, make: Any):
    whole = train(MODEL, text, out_dir=tmp_path / "whole", batches=make(), lr_schedule=rate, **FEW)
    stopped = train(MODEL, text, out_dir=tmp_path / "run", batches=make(), lr_schedule=rate, callbacks=[stop_at(5)], **FEW)
    assert (stopped.reason, stopped.step) == ("stopped", 5)
    resume(stopped.path, batches=make(), lr_schedule=rate, display=None)
    runs = RunDir(whole.path), RunDir(stopped.path)
    assert final_bytes(runs[0]) == final_bytes(runs[1])
    steps = [[e for e in events(run) if e["event"] == "step"] for run in runs]
    assert steps[0] == steps[1]
    assert [e["lr"] for e in steps[0]] == [rate(step) for step in range(6)]
    assert [e["epoch"] for e in steps[0]] == ([0, 0, 0, 0, 1, 1] if isinstance(make(), list | Epochs) else [0] * 6)


@pytest.fixture
def stopped_run(tmp_path: Path, text: str) -> Path:
    return train(MODEL, text, out_dir=tmp_path / "run", batches=batch, lr_schedule=rate, callbacks=[stop_at(3)], **FEW).path


def checkpoint_files(run: Path) -> dict[str, str]:
    return {str(path): file_sha256(path) for path in (run / "checkpoints").rglob("*") if path.is_file()}


def test_others_are_refused_and_the_run_is_as_it_was(stopped_run: Path, capsys: pytest.CaptureFixture):
    before = checkpoint_files(stopped_run)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "trained on the batches of a Python function"),
        ({"batches": batch}, "lr_schedule 'function' is a function of the step"),
        ({"batches": lambda step: batch(step + 1), "lr_schedule": rate}, "batches: for step 3 the run was given another batch"),
        (
            {"batches": batch, "lr_schedule": lambda step: 0.5},
            r"step 3 the run was given the rate 0\.0033333333, now 0\.5",
        ),
        ({"batches": [batch(0)] * 2, "lr_schedule": rate}, "another batch"),
        ({"batches": map(batch, range(2)), "lr_schedule": rate}, "batches ended after 2"),
    ]
    for given, message in wrong:
        with pytest.raises((ConfigError, InputError), match=message):
            resume(stopped_run, display=None, **given)
    assert main(["train", "resume", str(stopped_run)]) == 2
    assert "tapeless.resume(PATH, batches=FUNCTION)" in capsys.readouterr().err
    assert main(["train", "info", str(stopped_run)]) == 0
    assert f"tapeless.resume('{stopped_run}', batches=..., lr_schedule=...)" in capsys.readouterr().out
    assert checkpoint_files(stopped_run) == before


def test_another_schedule_may_begin_where_the_run_is(stopped_run: Path):
    later = lambda step: rate(step) if step < 3 else 1e-3  # noqa: E731
    result = resume(stopped_run, batches=batch, lr_schedule=later, display=None)
    assert [e["lr"] for e in result.events() if e["event"] == "step"][3:] == [1e-3] * 3


def test_a_named_schedule_and_a_function_replace_each_other(stopped_run: Path, tmp_path: Path, text: str):
    result = resume(stopped_run, batches=batch, lr_schedule="constant", display=None)
    assert [e["lr"] for e in result.events() if e["event"] == "step"][3:] == [TrainConfig().lr] * 3
    named = train(MODEL, text, out_dir=tmp_path / "named", lr_schedule="linear", callbacks=[stop_at(2)], **FEW).path
    result = resume(named, lr_schedule=rate, display=None)
    assert [e["lr"] for e in result.events() if e["event"] == "step"][2:] == [rate(step) for step in range(2, 6)]
    with pytest.raises(ConfigError, match="prepared data: leave out batches"):
        resume(named, batches=batch, lr_schedule=rate, display=None)


@pytest.mark.parametrize("name", ["batches", "lr_schedule"])
def test_an_exception_in_a_function_loses_no_work(tmp_path: Path, text: str, name: str):
    functions = {"batches": batch, "lr_schedule": rate}
    failed = lambda step: functions[name](step) if step < 3 else 1 / 0  # noqa: E731
    with pytest.raises(ZeroDivisionError):
        train(MODEL, text, out_dir=tmp_path / "run", **{**functions, name: failed}, **FEW)
    whole = train(MODEL, text, out_dir=tmp_path / "whole", **functions, **FEW)
    run = RunDir(tmp_path / "run")
    assert (run.checkpoints / "latest").read_text().strip() == "step-00000003"
    resume(run.path, **functions, display=None)
    assert final_bytes(run) == final_bytes(RunDir(whole.path))


def test_ids_outside_the_vocabulary_lose_no_work(tmp_path: Path, text: str):
    wrong = lambda step: batch(step) if step < 3 else (batch(step)[0], batch(step)[1] + 256)  # noqa: E731
    with pytest.raises(InputError, match=r"batches: step 4: target \[0, 0\] is \d+, outside the vocabulary of 256"):
        train(MODEL, text, out_dir=tmp_path / "run", batches=wrong, **FEW)
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().strip() == "step-00000003"


def test_a_run_that_diverges_names_the_call_that_continues_it(tmp_path: Path, text: str):
    with pytest.raises(NonFiniteError) as error:
        train(MODEL, text, out_dir=tmp_path / "run", batches=batch, lr_schedule=lambda step: 1e30, **{**FEW, "spike_z": 0.0})
    assert f"learning rate: tapeless.resume('{tmp_path / 'run'}', batches=..., lr_schedule=...)" in str(error.value)


def test_what_cannot_be_right_is_refused_before_anything_is_written(tmp_path: Path, text: str):
    draw = torch.Generator()
    two, wide = torch.zeros(2, 8, dtype=torch.int64), torch.zeros(3, 8, dtype=torch.int64)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"batches": lambda step: (torch.randint(256, (2, 8), generator=draw), two)}, "two different batches in two calls"),
        ({"batches": 3}, "batches is a int; expected a function"),
        ({"batches": batch, "epochs": 2}, "give max_steps"),
        ({"batches": lambda step: two}, r"expected \(tokens, targets\), int64 tensors .*, got Tensor"),
        ({"batches": [(two, two[:, :-1])]}, r"got int64 \(2, 8\), int64 \(2, 7\)"),
        ({"batches": [(two.float(), two)]}, r"got float32 \(2, 8\)"),
        ({"batches": [(wide, wide)]}, "3 rows of 8 tokens; expected at most 2 of 8.*set batch_size and seq_len"),
        ({"batches": batch, "grad_accum": 4}, "2 rows, which are not 4 equal micro-batches"),
        ({"batches": batch, "batch_size": 4, "micro_batches": 4}, "2 rows, which are not 4 equal micro-batches"),
        ({"batches": [("ab", "cd")]}, "got what torch.as_tensor refuses: "),
        ({"batches": []}, "batches ended after 0"),
        ({"lr_schedule": rate, "lr": 1e-3}, "lr has no effect"),
        ({"lr_schedule": lambda step: float("nan")}, r"lr_schedule\(0\) is nan"),
        ({"lr_schedule": "function"}, "pass it from Python"),
    ]
    for given, message in wrong:
        with pytest.raises((ConfigError, InputError), match=message):
            train(MODEL, text, out_dir=tmp_path / "run", **{**FEW, **given})
    with pytest.raises(ConfigError, match="pass data too"):
        train(MODEL, out_dir=tmp_path / "run", batches=batch, **FEW)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_checkpoint_of_another_run_names_no_function(tmp_path: Path, text: str):
    run = train(MODEL, text, out_dir=tmp_path / "run", callbacks=[stop_at(3)], **FEW).path
    (state,) = (run / "checkpoints").glob("step-00000003/state.json")
    assert json.loads(state.read_text())["functions"] is None
