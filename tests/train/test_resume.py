"""A run that was stopped, killed or damaged and resumed is the run that was never stopped: the same bytes, each line once."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_fixtures import EARLIEST_STATE, flip, rewrite_state
from run_fixtures import (
    MODEL,
    begin_run,
    config,
    copy_of,
    dataset,
    events,
    final_bytes,
    play,
    played_with_copies,
    state,
    text_of,
)

from tapeless.config import AnyModelConfig, SimpleLMConfig, TrainConfig
from tapeless.errors import ConfigError
from tapeless.model.build import build_model
from tapeless.training import evaluate, trainer
from tapeless.training.checkpoint import checkpoints, load_checkpoint, pointed
from tapeless.training.evaluate import Evaluation
from tapeless.training.metrics_log import read_metrics
from tapeless.training.run_dir import RunDir

# 77 windows: 12 steps of 2 x 8 samples go through two epochs and a half.
KINDS: dict[str, tuple[AnyModelConfig, dict[str, Any]]] = {
    "float32": (MODEL, {"batch_size": 8, "grad_accum": 2}),
    "bfloat16": (MODEL, {"batch_size": 8, "grad_accum": 2, "dtype": "bfloat16"}),
    "dropout": (replace(MODEL, dropout=0.2), {"grad_accum": 3}),
    "dropout bfloat16": (replace(MODEL, dropout=0.2), {"grad_accum": 2, "dtype": "bfloat16"}),
    "adam": (MODEL, {"optimizer": "adam", "lr_schedule": "restarts"}),
    "sgd": (MODEL, {"optimizer": "sgd", "nesterov": True, "lr": 0.1, "lr_schedule": "wsd"}),
    "muon": (MODEL, {"optimizer": "muon", "grad_accum": 2, "ema_decay": 0.9}),
    "muon bfloat16": (replace(MODEL, dropout=0.2), {"optimizer": "muon", "dtype": "bfloat16", "ema_decay": 0.5}),
    "ema": (MODEL, {"batch_size": 8, "ema_decay": 0.99}),
    "epochs": (MODEL, {"max_steps": None, "epochs": 3, "batch_size": 16, "seed": 5}),
    "simplelm": (SimpleLMConfig(hidden_dim=8, intermediate_dim=12), {"seq_len": 8}),
    "recompute": (replace(MODEL, dropout=0.1), {"recompute": "full"}),
}


def unbroken(tmp_path: Path, kind: str, **changes: Any) -> RunDir:
    model, settings = KINDS[kind]
    run = begin_run(tmp_path / "unbroken", config(**(settings | changes)), model)
    assert play(run)[0] == "done"
    return run


def begin_same(tmp_path: Path, kind: str, name: str, **changes: Any) -> RunDir:
    model, settings = KINDS[kind]
    return begin_run(tmp_path / name, config(**(settings | changes)), model)


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_at_any_step_and_resumed(tmp_path: Path, kind: str):
    """Steps with nothing due (1), an evaluation (3), a checkpoint (4), and all of it (12, the last)."""
    expected = unbroken(tmp_path, kind)
    for step in (1, 3, 4, 7, 12):
        run = begin_same(tmp_path, kind, f"stopped-{step}")
        ending, _ = play(run, stopped=lambda t, step=step: t.steps >= step)
        assert ending == "stopped"
        assert pointed(run.checkpoints, "latest") == step
        assert play(run, resume=True)[0] == "done"
        assert final_bytes(run) == final_bytes(expected)
        lines = ("step", "eval", "sample")  # the stop has a checkpoint of its own
        assert events(run, lines) == events(expected, lines)


@pytest.mark.parametrize("kind", ["float32", "dropout bfloat16", "muon"])
def test_killed_after_every_event(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    """Whatever moment it is, the run that goes on ends as the one that was let be, checkpoints and their lines included."""
    expected = begin_same(tmp_path, kind, "unbroken")
    copies = played_with_copies(expected, monkeypatch)
    assert len(copies) == len(list(read_metrics(expected.metrics))) > 20
    for copy in copies:
        assert play(copy, resume=True)[0] == "done"
        assert final_bytes(copy) == final_bytes(expected)
        assert events(copy) == events(expected)


def test_killed_again_and_again(tmp_path: Path):
    """Every process is killed at its third step, which is enough to come to the next checkpoint and hardly further."""
    expected = unbroken(tmp_path, "float32", save_every=2)

    class Killed(Exception):
        pass

    run, processes = begin_same(tmp_path, "float32", "killed", save_every=2), 0
    while True:
        left = 2

        def kill(event: dict[str, Any]) -> None:
            nonlocal left
            left -= event["event"] == "step"
            if left < 0:
                raise Killed

        processes += 1
        try:
            play(run, resume=processes > 1, on_event=kill)
        except Killed:
            continue
        break
    assert processes > 4
    assert final_bytes(run) == final_bytes(expected)
    assert events(run) == events(expected)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_every_checkpoint_leads_to_the_same_end(tmp_path: Path, kind: str):
    expected = unbroken(tmp_path, kind, save_every=1, keep_last=20)
    steps = checkpoints(expected.checkpoints)
    assert list(steps) == list(range(1, 13))
    for step, path in steps.items():
        run = copy_of(expected, f"from-{step}")
        (run.checkpoints / "latest").write_text(f"{path.name}\n")
        _, from_there = play(run, resume=True)
        assert from_there.resumed_from == step
        assert final_bytes(run) == final_bytes(expected)
        assert events(run) == events(expected)


def test_a_line_that_a_kill_cut_in_half_is_written_again(tmp_path: Path):
    expected = unbroken(tmp_path, "float32")
    run = begin_same(tmp_path, "float32", "cut")
    play(run, stopped=lambda t: t.steps >= 5)
    with open(run.metrics, "ab") as file:
        file.write(b'{"event": "step", "step": 6, "lo')
    play(run, resume=True)
    assert events(run, ["step"]) == events(expected, ["step"])


def test_killed_before_its_first_checkpoint_a_run_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    expected = begin_same(tmp_path, "float32", "unbroken")
    copies = played_with_copies(expected, monkeypatch)
    assert not checkpoints(copies[1].checkpoints)
    _, again = play(copies[1], resume=True)
    assert again.resumed_from is None
    assert final_bytes(copies[1]) == final_bytes(expected)
    assert events(copies[1]) == events(expected)


def test_stopped_before_its_first_step_a_run_saves_and_goes_on(tmp_path: Path):
    expected = unbroken(tmp_path, "float32")
    run = begin_same(tmp_path, "float32", "stopped")
    assert play(run, stopped=lambda t: True)[0] == "stopped"
    assert pointed(run.checkpoints, "latest") == 0
    play(run, resume=True)
    assert final_bytes(run) == final_bytes(expected)
    assert events(run, ["eval"]) == events(expected, ["eval"])


def test_stopped_inside_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is given up at once, without a line; the resume evaluates, and does not take the stop for a lack of patience."""
    monkeypatch.setattr(evaluate, "TOKENS", 16)
    expected = unbroken(tmp_path, "float32", patience=1, lr=1e-3)
    run = begin_same(tmp_path, "float32", "stopped", patience=1, lr=1e-3)
    asked: list[int] = []

    def stopped(a_trainer: trainer.Trainer) -> bool:
        asked.append(a_trainer.steps)
        return asked.count(3) >= 2  # the second question of step 3 is inside the evaluation

    assert play(run, stopped=stopped)[0] == "stopped"
    assert asked[-1] == 3
    assert not events(run, ["eval"])
    assert pointed(run.checkpoints, "latest") == 3
    assert play(run, resume=True)[0] == "done"
    assert final_bytes(run) == final_bytes(expected)
    assert events(run, ["eval"]) == events(expected, ["eval"])


def test_an_end_that_was_reached_is_done_even_if_a_stop_comes_late(tmp_path: Path):
    run = begin_same(tmp_path, "float32", "late")
    told: list[str] = []
    ending, _ = play(
        run, on_event=lambda e: told.append(f"{e['event']} {e['step']}"), stopped=lambda t: told[-1:] == ["sample 12"]
    )
    assert ending == "done"


def test_a_finished_run_stays_finished(tmp_path: Path):
    run = unbroken(tmp_path, "float32")
    before, lines = final_bytes(run), events(run)
    assert play(run, resume=True)[0] == "done"
    assert final_bytes(run) == before
    assert events(run) == lines


def test_patience_counts_an_evaluation_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Stopped right after an evaluation that is done again, and resumed, as often as there are evaluations."""
    losses = {2: 3.0, 4: 3.5, 6: 3.5, 8: 3.5, 10: 3.5, 12: 3.5}
    settings = {"eval_every": 2, "save_every": 100, "patience": 4}

    def run_to_the_end(name: str, stops: list[int]) -> RunDir:
        run = begin_same(tmp_path, "adam", name, **settings)
        for n, stop in enumerate([*stops, 100]):
            told: list[tuple[str, int]] = []
            at = {"step": 0}

            def note(event: dict[str, Any], told: list = told, at: dict = at) -> None:
                told.append((event["event"], event["step"]))
                at["step"] = max(at["step"], event["step"])  # the event of a checkpoint may come later

            monkeypatch.setattr(trainer, "evaluate", lambda *a, at=at, **o: Evaluation(losses[at["step"]], 1.0, 1.0))
            ending, _ = play(run, resume=n > 0, on_event=note, stopped=lambda t, told=told, stop=stop: ("eval", stop) in told)
            assert ending == ("early" if stop == 100 else "stopped")
        return run

    expected = run_to_the_end("unbroken", [])
    assert pointed(expected.checkpoints, "latest") == 10
    often = run_to_the_end("often", [2, 4, 6, 8])
    assert pointed(often.checkpoints, "latest") == 10
    assert state(often.checkpoints / "step-00000010") == state(expected.checkpoints / "step-00000010")
    assert events(often, ["step", "eval"]) == events(expected, ["step", "eval"])


def test_a_run_that_ended_early_ends_early_again_and_goes_on_with_more_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trainer, "evaluate", lambda *a, **o: Evaluation(3.0, 1.0, 1.0))
    run = begin_same(tmp_path, "adam", "early", eval_every=2, patience=2)
    assert play(run)[0] == "early"
    assert play(run, resume=True)[0] == "early"
    assert pointed(run.checkpoints, "latest") == 6
    ending, more = play(run, resume=True, patience=3)
    assert (ending, more.steps) == ("early", 8)


def test_another_batch_size_goes_on_at_the_sample_it_stands_at(tmp_path: Path):
    run = begin_same(tmp_path, "adam", "run", batch_size=2, max_steps=None, epochs=1)
    _, first = play(run, stopped=lambda t: t.steps >= 10)
    assert (first.samples, first.total_steps) == (20, 38)
    starts: list[int] = []
    _, second = play(run, resume=True, batch_size=5, stopped=lambda t: starts.append(t.samples) or t.steps >= 12)
    assert starts[0] == 20
    assert second.samples == 30
    assert second.tokens == 30 * 8
    assert second.total_steps == 10 + (77 - 20) // 5
    assert state(run.checkpoints / "step-00000012")["sample_index"] == 30


def test_another_optimizer_cannot_go_on_with_these_moments(tmp_path: Path):
    run = begin_same(tmp_path, "adam", "run")
    play(run, stopped=lambda t: t.steps >= 2)
    with pytest.raises(ConfigError, match=r"exp_avg, exp_avg_sq, but optimizer 'sgd' has momentum"):
        play(run, resume=True, optimizer="sgd")


def test_more_steps_after_the_end(tmp_path: Path):
    run = unbroken(tmp_path, "float32")
    ending, longer = play(run, resume=True, max_steps=15)
    assert (ending, longer.steps) == ("done", 15)
    assert [event["step"] for event in events(run, ["step"])] == list(range(1, 16))


def test_fewer_steps_than_were_taken_end_at_once(tmp_path: Path):
    run = begin_same(tmp_path, "float32", "run")
    play(run, stopped=lambda t: t.steps >= 7)
    ending, _ = play(run, resume=True, max_steps=5)
    assert ending == "done"
    assert pointed(run.checkpoints, "latest") == 7


@pytest.mark.parametrize("name", ["model.safetensors", "optim.safetensors", "state.json"])
def test_a_damaged_checkpoint_costs_steps_but_nothing_else(tmp_path: Path, name: str):
    expected = unbroken(tmp_path, "float32")
    run = begin_same(tmp_path, "float32", "damaged")
    play(run, stopped=lambda t: t.steps >= 9)  # checkpoints 8, which was due, and 9, where it stopped
    flip(-2)(run.checkpoints / "step-00000009" / name)
    _, resumed = play(run, resume=True)
    assert resumed.resumed_from == 8
    assert final_bytes(run) == final_bytes(expected)
    assert events(run) == events(expected)
    assert (run.checkpoints / "step-00000009.damaged-1").is_dir()


def test_best_does_not_name_another_future(tmp_path: Path):
    run = begin_same(tmp_path, "adam", "run", eval_every=3, save_every=1, keep_last=9)
    play(run, stopped=lambda t: t.steps >= 7)
    assert pointed(run.checkpoints, "best") == 6
    for step in (5, 6, 7):
        flip(-2)(run.checkpoints / f"step-0000000{step}" / "model.safetensors")
    _, resumed = play(run, resume=True, stopped=lambda t: True)
    assert resumed.resumed_from == 4
    assert resumed.best_step == pointed(run.checkpoints, "best") == 3
    (run.checkpoints / "best").write_text("rubbish")
    play(run, resume=True, stopped=lambda t: True)
    assert pointed(run.checkpoints, "best") == 3


def test_what_may_change_the_last_bits_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = begin_same(tmp_path, "float32", "run")
    play(run, stopped=lambda t: t.steps >= 2)
    play(run, resume=True, stopped=lambda t: t.steps >= 2)
    assert not events(run, ["guard"])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    play(run, resume=True, stopped=lambda t: t.steps >= 2)
    (guard,) = events(run, ["guard"])
    assert "threads was" in guard["warning"]
    assert "is 7" in guard["warning"]


def test_the_checkpoint_resumed_from_stays(tmp_path: Path):
    run = begin_same(tmp_path, "float32", "run", save_every=1, eval_every=0, keep_last=1)
    play(run, stopped=lambda t: t.steps >= 3)
    play(run, resume=True)
    assert list(checkpoints(run.checkpoints)) == [3, 12]


def test_state_says_where_the_data_stand(tmp_path: Path):
    run = unbroken(tmp_path, "float32")
    found = load_checkpoint(run.checkpoints, on_warning=pytest.fail).state
    assert (found["step"], found["sample_index"], found["tokens"], found["epoch"]) == (12, 192, 192 * 8, 192 // 77)
    assert json.loads((run.path / "data.json").read_text())["fingerprint"]
    assert [event["epoch"] for event in read_metrics(run.metrics) if event["event"] == "step"][-1] == 176 // 77


def test_the_defaults_of_a_run_resume_too(tmp_path: Path):
    run = begin_run(tmp_path / "run", TrainConfig(max_steps=3, seq_len=8))
    play(run, stopped=lambda t: t.steps >= 2)
    assert play(run, resume=True)[0] == "done"


def shards(folder: Path, cuts: list[int]) -> str:
    """Token files of llm.c, the training part cut at these places."""
    folder.mkdir()
    ids = np.frombuffer(text_of(700).encode(), np.uint8).astype("<u2")
    for number, piece in enumerate(np.split(ids[:620], cuts), 1):
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, len(piece)
        (folder / f"verse_train_{number:06d}.bin").write_bytes(header.tobytes() + piece.tobytes())
    header[2] = 80
    (folder / "verse_val_000000.bin").write_bytes(header.tobytes() + ids[620:].tobytes())
    return str(folder)


def test_over_several_token_files_as_over_one(tmp_path: Path):
    """A resume finds the files in the run's own directory, also where the ones it began with are gone."""
    whole = begin_run(tmp_path / "whole", config(batch_size=8, dataset_path=shards(tmp_path / "one", [])))
    assert play(whole)[0] == "done"
    run = begin_run(tmp_path / "run", config(batch_size=8, dataset_path=shards(tmp_path / "many", [3, 200, 411])))
    assert play(run, stopped=lambda t: t.steps >= 5)[0] == "stopped"
    shutil.rmtree(tmp_path / "many")
    assert play(run, resume=True)[0] == "done"
    assert final_bytes(run) == final_bytes(whole)


def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path):
    """Neither the base of adapters nor the guard against spikes is in its checkpoints."""
    expected = unbroken(tmp_path, "float32")
    run = begin_same(tmp_path, "float32", "earlier")
    play(run, stopped=lambda trainer: trainer.steps >= 4)
    path = run.checkpoints / "step-00000004"
    found = state(path)
    guard = {name: found["guard"][name] for name in EARLIEST_STATE["guard"]}
    rewrite_state(path, {name: found[name] for name in EARLIEST_STATE} | {"guard": guard})
    ending, trainer = play(run, resume=True)
    assert (ending, trainer.resumed_from) == ("done", 4)
    names = {"model.safetensors", "optim.safetensors"}  # the losses that the guard has not seen are not in its state
    assert all(final_bytes(run)[name] == final_bytes(expected)[name] for name in names)


def test_events_of_a_step_that_are_emitted_during_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As on a GPU: the same lines, each before the checkpoint of its step, also of a run that was stopped."""
    expected = unbroken(tmp_path, "float32")
    ordered: list[dict[str, Any]] = []
    original = trainer.Trainer.run

    def late(self: trainer.Trainer, **options: Any) -> str:
        self.reports_late = True
        return original(self, **options)

    monkeypatch.setattr(trainer.Trainer, "run", late)
    run = begin_same(tmp_path, "float32", "late")
    assert play(run, stopped=lambda trainer: trainer.steps == 5, on_event=ordered.append)[0] == "stopped"
    assert play(run, resume=True, on_event=ordered.append)[0] == "done"
    kinds = ("step", "layer_stats", "eval", "sample")
    assert events(run, kinds) == events(expected, kinds)
    assert final_bytes(run) == final_bytes(expected)
    seen = {event["step"]: i for i, event in enumerate(ordered) if event["event"] == "step"}
    due = [(i, event["step"]) for i, event in enumerate(ordered) if event["event"] in ("eval", "sample", "checkpoint")]
    assert due
    assert all(seen[step] < i for i, step in due)


def test_a_listener_that_fails_during_the_next_step_leaves_the_state_after_it(tmp_path: Path):
    taken, raised = (trainer.Trainer(build_model(MODEL), config(), dataset(tmp_path)) for _ in range(2))
    for _ in range(3):
        taken.step(*taken.next_batch())

    def fail(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 2:
            raise ZeroDivisionError

    raised.on_event, raised.reports_late = fail, True
    with pytest.raises(ZeroDivisionError):
        raised.run(display=None)
    assert (raised.steps, raised.optimizer.t, raised.tokens) == (3, 3, taken.tokens)
    assert torch.equal(raised.model.store.flat, taken.model.store.flat)
