"""`train info`: what a run's directory says of it, in every state that a run can be in."""

import json
import shutil
from pathlib import Path

import pytest
from run_fixtures import begin_run, config, play

from tapeless.data.locks import RunLock, holder
from tapeless.errors import ConfigError, DataError
from tapeless.report.history import RunHistory
from tapeless.training.info import describe, run_facts
from tapeless.training.run_dir import RunDir


def start(run: RunDir, total_steps: int = 12) -> dict:
    baselines = {"uniform": 5.5, "unigram": 3.5, "bigram": 2.5}
    facts = {"event": "start", "step": 0, "parameters": 1234, "total_steps": total_steps, "baselines": baselines, "floor": None}
    return {**facts, "changes": {}, "time": 1.7e9}


def step(n: int, loss: float = 2.0) -> dict:
    seen = {"event": "step", "step": n, "epoch": 0, "tokens": 16 * n, "loss": loss, "lr": 0.1, "grad_norm": 1.0}
    return {**seen, "step_seconds": 0.5, "tokens_per_second": 32.0, "time": 1.7e9 + n}


def found(n: int, loss: float | str) -> dict:
    return {"event": "eval", "step": n, "val_loss": loss, "perplexity": 1.0, "bits_per_byte": 1.0, "floor": None, "best": 1.0}


def write(run: RunDir, *events: dict, more: str = "") -> None:
    run.metrics.write_text("".join(json.dumps(event) + "\n" for event in events) + more)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return begin_run(tmp_path / "run", config())


def test_a_run_that_was_played_to_its_end(run: RunDir):
    ending, trainer = play(run)
    with run.metrics.open("r+") as file:  # what the command records before and after
        events = file.read()
        file.seek(0)
        file.write(json.dumps(start(run)) + "\n" + events + json.dumps({"event": "end", "step": 12, "reason": ending}) + "\n")
    facts = run_facts(run.path)
    assert (facts["state"], facts["step"], facts["total_steps"]) == ("done", 12, 12)
    assert facts["checkpoints"][-1] == facts["latest"] == 12
    assert facts["best_eval"]["val_loss"] == trainer.best_val_loss
    assert facts["best"] == trainer.best_step
    assert facts["tokens"] == 12 * 2 * 8
    assert json.loads(json.dumps(facts)) == facts
    text = " ".join(describe(facts).split())  # whatever the lines
    for words in (
        "done; step 12 of 12",
        "1,234 parameters",
        "2 layers of width 16",
        "batches of 2 x 8",
        "text.txt: 1 document",
    ):
        assert words in text
    assert f"tapeless train resume {run.path} --max-steps 24" in text


def test_prepared_and_never_begun(run: RunDir):
    facts = run_facts(run.path)
    assert (facts["state"], facts["step"], facts["checkpoints"]) == ("not started", 0, [])
    assert "no step was taken; step 0 of 12" in describe(facts)
    assert f"tapeless train resume {run.path} " in describe(facts)


def test_cut_off_in_the_middle_of_a_line(run: RunDir):
    write(run, start(run), step(1), step(2), more='{"event": "st')
    facts = run_facts(run.path)
    assert (facts["state"], facts["step"]) == ("interrupted", 2)
    assert "no checkpoint" in describe(facts)


def test_stopped_as_asked(run: RunDir):
    write(run, start(run), step(1), {"event": "end", "step": 1, "reason": "stopped"})
    (run.checkpoints / "step-00000001").mkdir()
    text = describe(run_facts(run.path))
    assert "stopped as requested; step 1 of 12" in text
    assert text.index("tapeless train resume") < text.index("tapeless generate")


def test_ended_early(run: RunDir):
    write(run, start(run), step(1), {"event": "end", "step": 1, "reason": "early"})
    assert "ended early: no new best in" in describe(run_facts(run.path))


def test_diverged_says_why(run: RunDir):
    write(run, start(run), step(1), {"event": "guard", "step": 1, "error": "step 2: loss nan"})
    facts = run_facts(run.path)
    assert facts["state"] == "diverged"
    assert "diverged: step 2: loss nan" in describe(facts)


def test_skipped_updates_are_counted(run: RunDir):
    spike = {"event": "guard", "step": 1, "warning": "a spike", "skipped": 1}
    write(run, start(run), step(1), spike, {"event": "guard", "step": 1, "warning": "threads"}, step(2))
    facts = run_facts(run.path)
    assert facts["skipped"] == 1
    assert "1 update skipped" in describe(facts)


def test_resumed_after_it_diverged_is_not_diverged(run: RunDir):
    resumed = start(run) | {"event": "resume"}
    write(run, start(run), {"event": "guard", "step": 0, "error": "loss nan"}, resumed, step(1))
    facts = run_facts(run.path)
    assert (facts["state"], facts["resumes"]) == ("interrupted", 1)
    assert "resumed 1 time" in describe(facts)


def test_losses_best_and_what_is_not_a_number(run: RunDir):
    losses = [step(n, loss=float(n)) for n in range(1, 41)]
    write(run, start(run), *losses, found(10, 2.0), found(20, 1.5), found(30, "NaN"))
    facts = run_facts(run.path)
    assert facts["best_eval"]["step"] == 20
    assert facts["recent_loss"] == pytest.approx(sum(range(21, 41)) / 20)
    assert (facts["first_loss"], facts["last_loss"], facts["seconds"]) == (1.0, 40.0, 20.0)
    text = describe(facts)
    assert "validation nan at step 30" in text
    assert "best       1.5000 at step 20" in text
    assert "bigram 2.5000, unigram 3.5000, uniform 5.5000" in text


def test_a_live_run_is_seen_and_not_disturbed(run: RunDir):
    write(run, start(run), step(1))
    with RunLock(run.lock):
        facts = run_facts(run.path)
        assert facts["state"] == "running"
        assert "process " in facts["held_by"]
        assert "running: process " in describe(facts)
        assert holder(run.lock)  # asking does not take it away
    assert run_facts(run.path)["state"] == "interrupted"
    with RunLock(run.lock):
        pass  # nor is it kept


def test_damage_is_left_to_resume(run: RunDir):
    write(run, start(run), step(1))
    (run.checkpoints / "step-00000001").mkdir()
    (run.checkpoints / "latest").write_text("nonsense")
    assert run_facts(run.path)["latest"] is None
    shutil.rmtree(run.checkpoints)
    assert run_facts(run.path)["checkpoints"] == []


def test_a_run_whose_log_is_gone_has_its_checkpoints(run: RunDir):
    play(run)
    run.metrics.unlink()
    facts = run_facts(run.path)
    assert (facts["state"], facts["step"]) == ("interrupted", 12)
    assert "start at step 0" not in describe(facts)


@pytest.mark.parametrize("event", [{"event": "step", "step": 1}, {"event": "eval", "step": 1}, {"event": "end", "step": 1}])
def test_an_event_that_is_not_whole_is_one_line(run: RunDir, event: dict):
    write(run, start(run), event)
    for read in (run_facts, lambda path: RunHistory.read(RunDir(path))):
        with pytest.raises(DataError, match=r"metrics\.jsonl: damaged: an event has a missing or mistyped field"):
            describe(read(run.path))


@pytest.mark.parametrize("change", [{"reason": 6}, {"step_seconds": 1e999}], ids=str)
def test_a_value_that_no_run_has_is_one_line(run: RunDir, change: dict):
    write(run, start(run), step(1) | change, {"event": "end", "step": 1, "reason": "done", "time": 1.0} | change)
    with pytest.raises(DataError, match=r"metrics\.jsonl: damaged: an event has a missing or mistyped field"):
        describe(run_facts(run.path))


def test_not_a_run(tmp_path: Path):
    with pytest.raises(ConfigError, match="is not the directory of a run"):
        run_facts(tmp_path)
