"""The loop: what happens at which step, in which order, and what stays on the disk."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_fixtures import MODEL, begin_run, config, dataset, events, play, state

from tapeless.config import Sampling, SimpleLMConfig, TrainConfig
from tapeless.data.prepare import open_prepared
from tapeless.errors import ConfigError, NonFiniteError, WriteError
from tapeless.generate.engine import Engine, generate
from tapeless.model.build import build_model
from tapeless.optim.schedule import learning_rate
from tapeless.training import checkpoint_writer
from tapeless.training import trainer as module
from tapeless.training.checkpoint import checkpoints, load_checkpoint, pointed, read_checkpoint, restore
from tapeless.training.checkpoint_writer import CheckpointWriter
from tapeless.training.evaluate import Evaluation
from tapeless.training.metrics_log import read_metrics
from tapeless.training.plan import DEFAULT_STEPS
from tapeless.training.run_dir import RunDir
from tapeless.training.trainer import Trainer


def trainer(tmp_path: Path, **changes: Any) -> Trainer:
    return Trainer(build_model(MODEL), config(**changes), dataset(tmp_path))


def scripted(monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> None:
    """Evaluations find these losses, one after the other."""
    left = iter(losses)
    monkeypatch.setattr(module, "evaluate", lambda *args, **options: Evaluation(next(left), 1.0, 1.0))


def test_events_and_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scripted(monkeypatch, [4.0, 5.0, 3.0])
    run = begin_run(tmp_path / "run", config(max_steps=5, save_every=3, eval_every=2, sample_every=3, layer_stats_every=2))
    ending, _ = play(run)
    assert ending == "done"
    logged = [(event["event"], event["step"]) for event in read_metrics(run.metrics)]
    assert [line for line in logged if line[0] != "checkpoint"] == [
        ("step", 1),
        ("layer_stats", 1),  # the first step is always looked at
        ("step", 2),
        ("layer_stats", 2),  # before the checkpoint, so that a resume has no need to look again
        ("eval", 2),
        ("time_spent", 2),
        ("step", 3),
        ("sample", 3),
        ("step", 4),
        ("layer_stats", 4),
        ("eval", 4),  # not the best, and not due to be saved
        ("time_spent", 4),
        ("step", 5),
        ("eval", 5),
        ("time_spent", 5),
        ("sample", 5),
        ("time_spent", 5),  # with the last save
    ]
    # The best so far, one that is due, and the last step, which is always saved. Each line comes once it is on disk.
    assert [line for line in logged if line[0] == "checkpoint"] == [("checkpoint", 2), ("checkpoint", 3), ("checkpoint", 5)]
    assert all(logged.index(("checkpoint", step)) > logged.index(("step", step)) for step in (2, 3, 5))
    assert [event["best"] for event in events(run, ["eval"])] == [4.0, 4.0, 3.0]


def test_every_event_says_what_the_contract_lists(tmp_path: Path):
    run = begin_run(tmp_path / "run", config(max_steps=2, eval_every=1))
    play(run)
    of = {event["event"]: set(event) for event in read_metrics(run.metrics)}
    shared = {"event", "step", "time"}
    assert of["step"] == shared | {"epoch", "tokens", "loss", "lr", "grad_norm", "step_seconds", "tokens_per_second"}
    assert of["eval"] == shared | {"val_loss", "perplexity", "bits_per_byte", "floor", "best"}
    assert of["sample"] == shared | {"text"}
    assert of["checkpoint"] == shared | {"path"}
    assert of["time_spent"] == shared | {"seconds"}


def test_a_checkpoint_is_on_the_disk_before_an_evaluation_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def out_of_memory(*args: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr(module, "evaluate", out_of_memory)
    run = begin_run(tmp_path / "run", config(save_every=4, eval_every=4))
    with pytest.raises(MemoryError):
        play(run)
    assert load_checkpoint(run.checkpoints, on_warning=pytest.fail).state["step"] == 4


def test_lines_are_synced_before_the_checkpoint_that_needs_them(tmp_path: Path):
    run = begin_run(tmp_path / "run", config(max_steps=5, save_every=2, eval_every=0))
    seen: list[list[int]] = []  # the checkpoints that exist at each call, which the writer's thread makes
    data, model = dataset(tmp_path), build_model(MODEL)
    Trainer(
        model,
        config(max_steps=5, save_every=2, eval_every=0, sample_every=0, eval_windows=1),
        data,
        run=run,
        before_save=lambda: seen.append(list(checkpoints(run.checkpoints))),
    ).run()
    assert seen == [[], [2], [2, 4]]


def test_rotation_keeps_the_last_every_nth_and_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scripted(monkeypatch, [3.0, 2.0, 2.5, math.nan, 2.2, 2.1])
    run = begin_run(tmp_path / "run", config(max_steps=12, save_every=1, eval_every=2, keep_last=2, keep_every=5))
    play(run)
    assert pointed(run.checkpoints, "best") == 4
    assert pointed(run.checkpoints, "latest") == 12
    assert list(checkpoints(run.checkpoints)) == [4, 5, 10, 11, 12]
    assert state(run.checkpoints / "step-00000012")["best_step"] == 4
    assert state(run.checkpoints / "step-00000012")["best_val_loss"] == 2.0


def test_nothing_beats_a_number_by_not_being_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scripted(monkeypatch, [math.nan, math.inf, math.nan])
    run = begin_run(tmp_path / "run", config(max_steps=3, eval_every=1))
    play(run)
    assert pointed(run.checkpoints, "best") is None
    assert [event["best"] for event in events(run, ["eval"])] == [None, None, None]
    assert [event["val_loss"] for event in events(run, ["eval"])] == ["NaN", "Infinity", "NaN"]


@pytest.mark.parametrize(
    ("losses", "last"),
    [
        ([3.0, 3.0, 3.1], 6),  # equal is not better
        ([3.0, 3.1, 2.0, 2.1, math.nan], 10),
        ([math.nan, math.nan], 4),
        ([5.0, 4.0, 3.0, 2.0, 1.0, 0.5], 12),
    ],
)
def test_patience(losses: list[float], last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scripted(monkeypatch, losses)
    run = begin_run(tmp_path / "run", config(eval_every=2, save_every=100, patience=2))
    ending, a_trainer = play(run)
    assert (ending, a_trainer.steps) == ("early" if last < 12 else "done", last)
    assert pointed(run.checkpoints, "latest") == last


def test_without_a_run_nothing_is_written_and_the_loop_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told: list[dict[str, Any]] = []
    whole = Trainer(build_model(MODEL), config(), dataset(tmp_path), on_event=told.append)
    before = sorted(tmp_path.rglob("*"))
    assert whole.run() == "done"
    own = Trainer(build_model(MODEL), config(), dataset(tmp_path))
    metrics = [own.step(*own.next_batch()) for _ in range(12)]
    assert sorted(tmp_path.rglob("*")) == before
    assert torch.equal(own.model.store.flat, whole.model.store.flat)
    steps = [event for event in told if event["event"] == "step"]
    assert [event["loss"] for event in steps] == [step.loss for step in metrics]
    assert [event["tokens"] for event in steps] == [step.tokens for step in metrics] == [16 * n for n in range(1, 13)]
    assert not any(event["event"] == "checkpoint" for event in told)


def test_what_a_step_sees_and_learns_at(tmp_path: Path):
    a_trainer = trainer(tmp_path, batch_size=2, grad_accum=3, max_steps=30)
    windows = a_trainer.loader.num_windows
    epochs = set()
    for n in range(30):
        tokens, targets = a_trainer.next_batch()
        expected = a_trainer.loader.batch(6 * n)
        assert torch.equal(tokens, expected[0])
        assert torch.equal(targets, expected[1])
        metrics = a_trainer.step(tokens, targets)
        assert metrics.epoch == 6 * n // windows
        wanted = learning_rate(n, schedule="warmup-cosine", total_steps=30, lr=1e-2, min_lr=1e-3, warmup_steps=1)
        assert metrics.lr == wanted == a_trainer.optimizer.lr
        epochs.add(metrics.epoch)
    assert epochs == {0, 1, 2}


@pytest.mark.parametrize(
    ("limits", "total"),
    [
        ({"max_steps": None}, 1000),
        ({"max_steps": None, "epochs": 2}, 77),
        ({"max_steps": 50, "epochs": 2}, 50),
        ({"max_steps": 100, "epochs": 2}, 77),
        ({"max_steps": None, "epochs": 1, "batch_size": 50, "grad_accum": 10}, 1),
        ({"max_steps": None, "epochs": 2, "grad_accum": 2}, 38),
    ],
)
def test_whichever_limit_is_reached_first_ends_the_run(limits: dict[str, int], total: int, tmp_path: Path):
    a_trainer = trainer(tmp_path, **limits)
    assert a_trainer.loader.num_windows == 77
    assert a_trainer.total_steps == total


@pytest.mark.parametrize(
    ("given", "warmup"),
    [
        ({"max_steps": 100}, 5),
        ({"max_steps": 5000}, 100),
        ({"max_steps": 10}, 0),
        ({"max_steps": 100, "warmup_steps": 0}, 0),
        ({"max_steps": 100, "warmup_steps": 100}, 100),
        ({"max_steps": 100, "lr_schedule": "constant"}, 0),
        ({"max_steps": 100, "lr_schedule": "linear", "warmup_steps": 7}, 7),
    ],
)
def test_warm_up(given: dict[str, Any], warmup: int, tmp_path: Path):
    assert trainer(tmp_path, **given).warmup_steps == warmup


def test_a_warm_up_beyond_the_steps_is_an_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="warmup_steps 78 is beyond the 77 steps of the run"):
        trainer(tmp_path, max_steps=None, epochs=2, warmup_steps=78)


def test_a_model_without_attention_trains_too(tmp_path: Path):
    model = build_model(SimpleLMConfig(hidden_dim=8, intermediate_dim=12))
    losses: list[float] = []
    a_trainer = Trainer(
        model,
        config(max_steps=60, batch_size=8, eval_every=0),
        dataset(tmp_path),
        on_event=lambda event: losses.append(event["loss"]) if event["event"] == "step" else None,
    )
    assert a_trainer.seq_len == 32
    assert a_trainer.run() == "done"
    assert losses[-1] < losses[0] - 2


def test_samples_are_told_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    submit, submitted = Engine.submit, [0]

    def failing_once(*args: Any, **options: Any) -> Any:
        submitted[0] += 1
        if submitted[0] == 2:
            raise RuntimeError("no compiler")
        return submit(*args, **options)

    monkeypatch.setattr(Engine, "submit", failing_once)
    options: dict[str, Any] = {"max_steps": 8, "sample_every": 2, "save_every": 2, "keep_last": 9}
    run = begin_run(tmp_path / "run", config(**options, sample_prompt="the fox", sample_tokens=9, sample_temperature=0))
    play(run)
    told = {event["step"]: event["text"] for event in events(run, ["sample"])}
    assert list(told) == [2, 6, 8]
    tokenizer, model = open_prepared(run.path).tokenizer, build_model(MODEL)
    for step, text in told.items():
        assert (run.samples / f"step-0000000{step}.txt").read_text() == text
        saved = read_checkpoint(run.checkpoints / f"step-{step:08d}")
        restore(model.params, saved.params, saved.path)
        prompt, V = tokenizer.encode("the fox").tolist(), tokenizer.vocab_size
        (ids,) = generate(model, prompt, max_tokens=9, vocab_size=V, sampling=Sampling(temperature=0))
        assert text == tokenizer.decode([*prompt, *ids])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sample_is_of_the_weights_as_they_are(tmp_path: Path, dtype: str):
    """torch does not count what its fused optimizers write, nor what numpy does."""
    options = {"sample_prompt": "the", "sample_tokens": 5, "sample_temperature": 0.0, "dtype": dtype}
    settings, data = config(**options), dataset(tmp_path)
    trainer = Trainer(build_model(MODEL, dtype=dtype), settings, data)
    first = trainer.sample()
    trainer.model.store.flat.numpy()[:] = build_model(MODEL, dtype=dtype, seed=1).store.flat.numpy()
    second = trainer.sample()
    assert first != second == Trainer(build_model(MODEL, dtype=dtype, seed=1), settings, data).sample()


def test_a_loop_of_ones_own_hears_of_a_save_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fails(folder: Path, *args: Any) -> Path:
        raise WriteError(f"{folder} could not be written: No space left on device")

    monkeypatch.setattr(checkpoint_writer, "save_checkpoint", fails)
    run = begin_run(tmp_path / "run", config())
    trainer = Trainer(build_model(MODEL), config(), dataset(tmp_path), run=run)
    trainer.step(*trainer.next_batch())
    trainer.evaluate()  # the first is the best, and saved in the background
    trainer._writer.wait()
    assert caplog.messages == []
    trainer.step(*trainer.next_batch())
    assert caplog.messages == [f"{run.checkpoints} could not be written: No space left on device; training continues"]


def test_a_sample_reads_no_file(tmp_path: Path):
    """A disk that failed for a moment would take one out of the log."""
    run = begin_run(tmp_path / "run", config(max_steps=4, sample_every=2))

    def fails(event: dict[str, Any]) -> None:
        (run.path / "generation_config.json").write_text("damaged")

    play(run, on_event=fails)
    assert [event["step"] for event in events(run, ["sample"])] == [2, 4]


@pytest.fixture
def diverging(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """From a step on, the loss is no number."""

    def at(first_bad: int) -> None:
        original = module.train_step

        def spoilt(model: Any, *args: Any, step: int, **options: Any) -> Any:
            if step >= first_bad:
                model.forward_backward = lambda *a, **o: torch.tensor(math.nan)
            return original(model, *args, step=step, **options)

        monkeypatch.setattr(module, "train_step", spoilt)

    return at


def test_a_run_that_diverges_says_so_and_keeps_what_was_good(tmp_path: Path, diverging: Callable[[int], None]):
    diverging(6)
    run = begin_run(tmp_path / "run", config())
    with pytest.raises(NonFiniteError, match="step 7: loss nan"):
        play(run)
    assert [event["step"] for event in events(run, ["step"])] == [1, 2, 3, 4, 5, 6]
    (guard,) = events(run, ["guard"])
    assert guard["step"] == 6
    assert "step 7: loss nan" in guard["error"]
    assert load_checkpoint(run.checkpoints, on_warning=pytest.fail).state["step"] == 6  # the evaluation's best


def test_weights_that_are_no_numbers_are_not_saved(tmp_path: Path):
    run = begin_run(tmp_path / "run", config())
    a_trainer = Trainer(build_model(MODEL), config(), dataset(tmp_path), run=run)
    a_trainer.model.params["head.w"][3, 2] = math.inf
    with pytest.raises(NonFiniteError, match=r"head\.w .* first at \[3, 2\]: inf"):
        a_trainer.save()
    assert not checkpoints(run.checkpoints)


def test_a_configuration_alone_is_enough(tmp_path: Path):
    """The bare defaults of TrainConfig: nothing is needed but a model and data."""
    assert Trainer(build_model(MODEL), TrainConfig(), dataset(tmp_path)).total_steps == DEFAULT_STEPS


def test_tokens_per_second_count_the_loading_of_a_batch_but_no_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = [0.0]

    def slowed(owner: Any, name: str, seconds: float) -> None:
        function = getattr(owner, name)

        def slow(*args: Any, **options: Any) -> Any:
            clock[0] += seconds
            return function(*args, **options)

        monkeypatch.setattr(owner, name, slow)

    monkeypatch.setattr("tapeless.training.trainer.time.perf_counter", lambda: clock[0])
    for name, seconds in (("next_batch", 0.25), ("_computed", 0.5)):
        slowed(Trainer, name, seconds)
    slowed(sys.modules[Trainer.__module__], "evaluate", 100.0)
    slowed(Engine, "submit", 30.0)
    slowed(CheckpointWriter, "save", 7.0)
    told: list[dict[str, Any]] = []
    trainer = Trainer(
        build_model(MODEL),
        config(max_steps=6, eval_every=2, save_every=1, sample_every=3),
        dataset(tmp_path),
        run=RunDir.create(tmp_path / "run"),
        on_event=told.append,
    )
    trainer.run()
    steps = [event for event in told if event["event"] == "step"]
    assert [event["step_seconds"] for event in steps] == [0.5] * 6
    assert [event["tokens_per_second"] for event in steps] == [16 / 0.75] * 6
    spent = next(event["seconds"] for event in reversed(told) if event["event"] == "time_spent")
    expected = {"data": 1.5, "step": 3.0, "evaluation": 300.0, "samples": 60.0, "checkpoints": 42.0}
    assert {name: spent[name] for name in expected} == expected
    assert sum(spent.values()) == sum(expected.values())
