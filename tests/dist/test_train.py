"""`tapeless.train` and `tapeless.resume` on ranks: the run of one, whatever the first rank alone is asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import local
from typing import Any

import pytest
import torch
from rank_threads import ThreadRank, on_ranks
from run_fixtures import MODEL, config, dataset, events, final_bytes, text_file

import tapeless
from tapeless import STOP, runner
from tapeless.data import prepare
from tapeless.dist.world import ALONE, World
from tapeless.errors import ConfigError, InputError
from tapeless.model.build import build_model
from tapeless.training import trainer
from tapeless.training.run_dir import RunDir

FEW: dict[str, Any] = {"max_steps": 8, "eval_every": 2, "save_every": 3, "sample_every": 4, "sample_tokens": 3, "verify": False}
FEW |= {"batch_size": 6, "micro_batches": 3, "display": None, "report_to": "none", "lr": 1e-2}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> local:
    """Whose `world` the trainings of a thread join."""
    found = local()

    @contextmanager
    def joined(device: str) -> Iterator[World]:
        yield getattr(found, "world", ALONE)

    monkeypatch.setattr(runner, "joined", joined)
    # Ranks may record at once what they have verified, in temporary files with the process id in their names: here one.
    monkeypatch.setattr(prepare, "_update_record", lambda *_: None)
    return found


def on_threads(here: local, size: int, function: Any, *args: Any, **options: Any) -> list[str]:
    """Why the training of every rank has ended."""

    def work(world: World) -> str:
        here.world = world
        return function(*args, **options).reason

    return on_ranks(size, work)


def result(run: Path) -> tuple[list[Any], dict[str, str]]:
    logged = events(RunDir(run), ("step", "eval", "sample"))
    return logged, {name: x for name, x in final_bytes(RunDir(run)).items() if name != "state.json"}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(256, (6, 8), generator=draw), torch.randint(256, (6, 8), generator=draw)
    targets[: step % 6] = -100
    return tokens, targets


@pytest.mark.parametrize("own", [False, True])
def test_a_run_that_a_callback_stops_and_more_ranks_continue(here: local, tmp_path: Path, own: bool):
    data = text_file(tmp_path, 900)
    functions: dict[str, Any] = {"batches": batch, "lr_schedule": lambda step: 1e-2 / (1 + step)} if own else {}
    options = {key: value for key, value in FEW.items() if not (own and key == "lr")} | functions
    options |= {"ema_decay": 0.9, "patience": 3}
    tapeless.train(MODEL, data, out_dir=tmp_path / "alone", **options)
    options["callbacks"] = [lambda event: STOP if event["event"] == "step" and event["step"] == 4 else None]
    out = tmp_path / "ranks"
    assert on_threads(here, 2, tapeless.train, MODEL, data, out_dir=out, **options) == ["stopped"] * 2
    assert len(set(on_threads(here, 3, tapeless.resume, out, display=None, **functions))) == 1
    assert result(out) == result(tmp_path / "alone")


def test_adapters_of_another_run(here: local, tmp_path: Path):
    data = text_file(tmp_path, 900)
    base, options = tmp_path / "base", {"init_from": str(tmp_path / "base"), "lora_rank": 2}
    tapeless.train(MODEL, data, out_dir=base, **FEW)
    options |= {"dataset_path": data, **FEW}
    tapeless.train("default", out_dir=tmp_path / "alone", **options)
    on_threads(here, 3, tapeless.train, "default", out_dir=tmp_path / "ranks", **options)
    assert result(tmp_path / "ranks") == result(tmp_path / "alone")


def test_fewer_validation_batches_than_ranks(here: local, tmp_path: Path):
    data = text_file(tmp_path, 900)
    for size, out in ((1, tmp_path / "alone"), (3, tmp_path / "ranks")):
        on_threads(here, size, tapeless.train, MODEL, data, out_dir=out, **(FEW | {"eval_windows": 1}))
    assert result(tmp_path / "ranks") == result(tmp_path / "alone")


def test_own_batches_that_differ_between_ranks_are_refused(here: local, tmp_path: Path):
    class Own:
        def __iter__(self) -> Iterator[Any]:
            return (batch(step + here.world.rank) for step in range(100))

    with pytest.raises(ConfigError, match="not the same on all ranks"):
        on_threads(here, 2, tapeless.train, MODEL, text_file(tmp_path, 900), batches=Own(), out_dir=tmp_path / "run", **FEW)


def test_evaluation_is_asked_for_the_rows_that_memory_was_estimated_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    monkeypatch.setattr(trainer, "evaluate", lambda *_, rows, **options: asked.append(rows))
    options = config(batch_size=6, grad_accum=2, micro_batches=4)
    trainer.Trainer(build_model(MODEL), options, dataset(tmp_path)).evaluate()
    assert asked == [3]


def test_ranks_that_do_not_divide_the_rows_are_refused_by_name(here: local, tmp_path: Path):
    here.world = ThreadRank(0, 4, None)
    options = FEW | {"micro_batches": None, "out_dir": tmp_path / "run"}
    with pytest.raises(ConfigError, match="the 6 rows of a step are not 4 equal micro-batches, one for each rank"):
        tapeless.train(MODEL, text_file(tmp_path, 900), **options)


def test_the_memory_of_a_machine_is_shared_by_its_own_ranks(here: local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "_resource_errors", lambda *args: [InputError(f"{args[-1]} ranks")])
    here.world = ThreadRank(0, 3, None)
    here.world.local_size = 2
    with pytest.raises(InputError, match="2 ranks"):
        tapeless.train(MODEL, text_file(tmp_path, 900), out_dir=tmp_path / "run", **FEW)
