"""What a person sees: the numbers are those of the events, whatever shows them; and a terminal is never left broken."""

import io
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from rich.console import Console
from run_fixtures import MODEL, config, dataset

from tapeless.config import ModelConfig, SimpleLMConfig
from tapeless.data.baselines import Baselines
from tapeless.data.chat import CHATML, write_template
from tapeless.text import readable
from tapeless.training import display as display_module
from tapeless.training.display import (
    Display,
    JsonDisplay,
    LiveDisplay,
    NotebookDisplay,
    Progress,
    curve,
    framed,
    make_display,
    memory,
)
from tapeless.training.runs import make_model
from tapeless.training.summary import decay_groups, duration, introduction, model_text, next_commands
from tapeless.training.trainer import Trainer

BEATEN = Baselines(5.5452, 3.2, 2.5)


def step(n: int, loss: float = 2.0, seconds: float = 0.5) -> dict:
    seen = {"event": "step", "step": n, "epoch": 0, "tokens": 16 * n, "loss": loss, "lr": 1e-3, "grad_norm": 0.75}
    return {**seen, "step_seconds": seconds, "tokens_per_second": 16 / seconds, "time": 0.0}


def found(n: int, loss: float, best: float | None, floor: float | None = None) -> dict:
    return {"event": "eval", "step": n, "val_loss": loss, "perplexity": 9.0, "bits_per_byte": 3.1, "floor": floor, "best": best}


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    train = config()
    return Trainer(make_model(MODEL, train), train, dataset(tmp_path))


def live(width: int = 100) -> tuple[LiveDisplay, io.StringIO]:
    shown = LiveDisplay()
    out = io.StringIO()
    shown.console = Console(file=out, force_terminal=True, width=width, height=40, highlight=False, color_system=None)
    return shown, out


def rendered(shown: LiveDisplay) -> str:
    console = Console(file=io.StringIO(), width=shown.console.width, color_system=None)
    console.print(shown.panel())
    return console.file.getvalue()


# the numbers of the moment


def test_the_smoothed_loss_is_a_mean_without_a_bias_to_zero():
    progress = Progress()
    progress.take(step(1, loss=4.0))
    assert progress.losses == [pytest.approx(4.0)]
    for n in range(2, 200):
        progress.take(step(n, loss=2.0))
    assert progress.losses[1] == pytest.approx((0.95 * 4 + 2) / 1.95)
    assert progress.losses[-1] == pytest.approx(2.0, abs=1e-3)


def test_speed_and_time_left(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(display_module.time, "monotonic", lambda: now[0])
    progress = Progress(first_step=10, total_steps=110)
    for n in range(11, 21):
        now[0] += 2.0
        progress.take(step(n, seconds=0.5))
    assert progress.tokens_per_second == pytest.approx(32.0)
    assert progress.left == "3 min 00 s"  # 90 steps of 2 s: evaluations count, whatever a step itself takes


def test_durations():
    assert [duration(s) for s in (0, 41.4, 59.6, 200, 3600, 7500)] == [
        "0 s",
        "41 s",
        "1 min 00 s",
        "3 min 20 s",
        "1 h 00 min",
        "2 h 05 min",
    ]


def test_memory_is_this_process():
    amount, unit = memory().replace(",", "").split()
    assert unit in ("MB", "GB")
    assert 10 < float(amount) * (1000 if unit == "GB" else 1) < 100_000


def test_the_curve():
    assert curve([1.0] * 3, 4) == ""  # nothing to show yet
    assert curve([8.0, 6.0, 4.0, 1.0], 4) == "█▆▄▁"
    assert curve([2.0] * 8, 4) == "▁▁▁▁"
    assert len(curve([float(n) for n in range(1001)], 48)) == 48


def test_what_a_model_draws_cannot_command_the_terminal():
    assert readable("a\x1b[2Jb\tc\x00\n\u202ed") == "a\ufffd[2Jb    c\ufffd\n\ufffdd"
    assert framed("one\n\ntwo" + "x" * 30, "| ", 22) == "| one\n| \n| two" + "x" * 17 + "\n| " + "x" * 13


# who is shown what


def test_the_kind_follows_the_output(monkeypatch: pytest.MonkeyPatch):
    assert type(make_display("json", 1)) is JsonDisplay
    assert "not a terminal" in make_display("auto", 1).reason
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert type(make_display("auto", 1)) is LiveDisplay
    monkeypatch.setattr(display_module, "find_spec", lambda name: None)
    assert "pip install rich" in make_display("auto", 1).reason
    monkeypatch.setenv("TERM", "dumb")
    assert "not a terminal" in make_display("auto", 1).reason


def test_rich_is_loaded_for_a_terminal_alone():
    import subprocess

    code = "import sys, tapeless.training.display as d; d.make_display('auto', 1); print('rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_plain_lines_align_and_are_thinned(trainer: Trainer, capsys: pytest.CaptureFixture):
    display = Display(log_every=5)
    display.progress = Progress(0, 12)
    for n in range(1, 13):
        display.event(step(n))
    display.event(found(12, 1.5, 1.5))
    display.event({"event": "sample", "step": 12, "text": "to be\nor \x1b[0m"})
    display.event({"event": "checkpoint", "step": 12, "path": "step-00000012"})
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    heading = lines.index(next(line for line in lines if "smoothed" in line))
    assert [int(line.split()[0]) for line in lines[heading + 1 : heading + 5]] == [1, 5, 10, 12]
    assert {len(line) for line in lines[heading : heading + 5]} == {len(lines[heading])}
    assert lines[heading + 2].split()[1:6] == ["2.0000", "2.0000", "0.750", "1.00e-03", "32"]
    assert " ".join(lines[-4].split()) == "12 validation 1.5000 new best perplexity 9.00, 3.100 bits per byte"
    assert lines[-3:] == ["      12 sample", "         | to be", "         | or \ufffd[0m"]


def test_json_is_the_line_of_the_log_and_warnings_go_elsewhere(capsys: pytest.CaptureFixture, trainer: Trainer):
    display = JsonDisplay()
    with display:
        display.introduce(None, trainer, BEATEN)
        display.verified(2, ["wq is wrong"])
        display.event({"event": "eval", "step": 1, "val_loss": float("nan")})
        display.event({"event": "guard", "step": 1, "warning": "careful"})
        display.close(None, trainer, "done")
    out, err = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == [
        {"event": "eval", "step": 1, "val_loss": "NaN"},
        {"event": "guard", "step": 1, "warning": "careful"},
    ]
    assert err == "warning: wq is wrong\nwarning: careful\n"


def test_a_failed_check_is_named(capsys: pytest.CaptureFixture):
    Display().verified(2, ["wq is wrong"])
    out, err = capsys.readouterr()
    assert "1 of 2 checks FAILED on the first batch; nothing was trained" in out
    assert err == "warning: wq is wrong\n"


def test_the_panel_has_every_number():
    shown, _ = live()
    shown.baselines, shown.progress = BEATEN, Progress(0, 200)
    assert "first step" in rendered(shown)
    for n in range(1, 101):
        shown.event(step(n))
    panel = rendered(shown)
    for words in ("100/200", " left", "loss 2.0000", "smoothed 2.0000", "bigram 2.5000", "gradient norm 0.750", "lr 1.00e-03"):
        assert words in panel
    for words in ("tokens/s 32", "epoch 1", "memory "):
        assert words in panel
    assert "validation" not in panel
    shown.event(found(100, 1.75, 1.5, floor=1.25))
    assert "validation 1.7500   best 1.5000   floor 1.2500" in rendered(shown)
    shown.event(found(100, float("nan"), None))
    assert "best none" in rendered(shown)


def test_a_narrow_terminal_loses_no_number():
    shown, _ = live(width=40)
    shown.baselines, shown.progress = BEATEN, Progress(0, 200)
    for n in range(1, 101):
        shown.event(step(n))
    panel = rendered(shown)
    assert max(map(len, panel.splitlines())) <= 40
    assert all(word in panel for word in ("2.0000", "2.5000", "0.750", "1.00e-03", "tokens/s"))


def test_what_happened_stands_above_and_the_cursor_stays_visible():
    shown, out = live()
    shown.progress = Progress(0, 10)
    with shown:
        text = out.getvalue()
        assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")  # a kill now must not leave a terminal without a cursor
        shown.event(step(1))
        shown.event(found(1, 1.5, 1.5))
        shown.event({"event": "sample", "step": 1, "text": "[bold]not markup[/bold] \x1b[31m"})
        shown.warn("[red]careful")
    printed = out.getvalue()
    for words in ("validation 1.5000   new best", "│ [bold]not markup[/bold] \ufffd[31m", "warning: [red]careful"):
        assert words in printed


class Notebook(ModuleType):
    """What IPython is to a notebook: a shell with a kernel, and areas that can be updated."""

    def __init__(self) -> None:
        super().__init__("IPython.display")
        self.shown: list[dict[str, str]] = []

    def get_ipython(self) -> object:
        return SimpleNamespace(kernel=None)

    def display(self, content: dict[str, str], *, raw: bool, display_id: bool) -> object:
        assert (raw, display_id) == (True, True)
        self.shown.append(content)
        return SimpleNamespace(update=lambda content, *, raw: self.shown.append(content))


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    found = Notebook()
    monkeypatch.setitem(sys.modules, "IPython", found)
    monkeypatch.setitem(sys.modules, "IPython.display", found)
    monkeypatch.setattr(display_module, "UPDATE", 0.0)
    return found


def test_a_notebook_has_one_area_that_is_updated(trainer: Trainer, notebook: Notebook, capsys: pytest.CaptureFixture):
    assert trainer.run() == "done"
    first, *updates, last = [content["text/plain"].splitlines() for content in notebook.shown]
    assert first == ["first step …"]
    assert [int(lines[1].split()[0]) for lines in (*updates, last)] == [*range(1, 13), 12]
    assert 'value="12" max="12"' in notebook.shown[-1]["text/html"]
    out = capsys.readouterr().out
    assert f"validation {trainer.last_val_loss:.4f}" in out
    assert "tokens/s" not in out


def test_the_area_of_a_notebook_is_updated_a_few_times_a_second(
    trainer: Trainer, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(display_module, "UPDATE", 1e9)
    trainer.run()
    assert len(notebook.shown) == 2  # the first, and the last step


def test_ipython_in_a_terminal_is_no_notebook(notebook: Notebook, monkeypatch: pytest.MonkeyPatch):
    assert type(make_display("auto", 1)) is NotebookDisplay
    monkeypatch.setattr(notebook, "get_ipython", lambda: SimpleNamespace())
    assert type(make_display("auto", 1)) is Display
    monkeypatch.setattr(notebook, "get_ipython", lambda: None)  # imported, but nobody runs it
    assert type(make_display("auto", 1)) is Display


def test_the_loop_alone_shows_its_progress_too(trainer: Trainer, capsys: pytest.CaptureFixture):
    seen: list[str] = []
    trainer.on_event = lambda event: seen.append(event["event"])
    trainer.run()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["step", "loss"]
    assert [line.split()[0] for line in lines if " s " in line] == ["1", "10", "12"]  # left
    assert seen.count("step") == 12


def test_or_not(trainer: Trainer, capsys: pytest.CaptureFixture):
    trainer.run(display=None)
    assert capsys.readouterr().out == ""


def test_a_failure_ends_the_live_display():
    shown, _ = live()
    with pytest.raises(ValueError, match="boom"), shown:
        raise ValueError("boom")
    assert not shown._live.is_started


# words


def test_the_introduction_says_what_was_decided(trainer: Trainer, tmp_path: Path):
    rows = dict(introduction(tmp_path / "run", trainer, BEATEN))
    assert rows["run"] == str(tmp_path / "run")
    assert rows["baselines"] == "ln 256 5.5452, unigram 3.2000, bigram 2.5000"
    assert rows["steps"] == "12 of 2 x 8 = 16 tokens, 0.312 epochs; no warm-up"
    assert rows["tokenizer"] == "bytes, 256 ids, 1.00 bytes per token of the validation text"
    assert (
        rows["optimizer"]
        == "adamw, beta1 0.9, beta2 0.95, eps 1e-08, lr 0.01, warmup-cosine to 0.001, gradient norm clipped at 1"
    )
    assert rows["ops"].startswith("reference (")


def test_a_vocabulary_larger_than_the_tokenizers_is_said_aloud(tmp_path: Path):
    from dataclasses import replace

    train = config(optimizer="sgd", nesterov=True, lr_schedule="constant", weight_decay=0.0, grad_clip=0.0, grad_accum=2)
    trainer = Trainer(make_model(replace(MODEL, vocab_size=300), train), train, dataset(tmp_path))
    rows = dict(introduction(None, trainer, BEATEN))
    assert "the model has 300: 44 are unused" in rows["tokenizer"]
    assert rows["optimizer"] == "sgd, momentum 0.9, nesterov, lr 0.01, constant, no clipping"
    assert rows["decay"] == "none"
    assert "2 x 8 x 2 micro-batches = 32 tokens" in rows["steps"]


def test_decay_groups_by_kind():
    names = ["embed.w", *(f"blocks.{i}.{n}" for i in range(3) for n in ("attn_norm.w", "attn.wq", "attn.wk")), "head.w"]
    decay = {name for name in names if "norm" not in name}
    assert decay_groups(names, decay) == ("embed.w, attn.{wq wk}, head.w", "attn_norm.w")
    assert decay_groups(["w.b"], []) == ("", "w.b")


def test_models_in_words():
    assert "4 heads with 2 KV heads" in model_text(ModelConfig(num_kv_heads=2), None)
    assert model_text(SimpleLMConfig(), 98688) == "98,688 parameters: SimpleLM, width 64, hidden layer 256, vocabulary 256"
    post = model_text(ModelConfig(norm_placement="post", tie_embeddings=True, dropout=0.1, position="none"), 5)
    assert "RMSNorm after each sublayer, no positions, vocabulary 256 (tied), up to 128 tokens, dropout 0.1" in post


def test_the_closing_stands_beside_what_was_to_beat(trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture):
    display = Display()
    display.baselines = BEATEN
    trainer.steps, trainer.best_val_loss, trainer.best_step = 12, 1.5, 6
    display.event(found(12, 2.0, 1.5))
    capsys.readouterr()
    display.close(tmp_path / "my run", trainer, "done")
    out = capsys.readouterr().out
    for words in (
        "validation 2.0000",
        "best       1.5000   at step 6",
        "2.5000   the validation loss is 20.0 % below",
    ):
        assert words in out
    assert f"tapeless generate '{tmp_path / 'my run'}'" in out  # a path with a space can be pasted
    display.progress.eval = {}
    display.close(None, trainer, "stopped")
    out = capsys.readouterr().out
    assert "stopped    at step 12 of 12, as requested; a checkpoint is saved" in out
    assert "tapeless" not in out


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_the_next_commands_parse(name: str, tmp_path: Path):
    import shlex

    from tapeless.cli.main import build_parser

    run = tmp_path / "a b"
    run.mkdir()
    if name == "chat":
        write_template(run, CHATML)
    for ending in ("done", "early", "stopped", "interrupted", "diverged"):
        commands = [shlex.split(command)[1:] for command, _ in next_commands(run, ending, 100)]
        assert [name, str(run)] in [words[:2] for words in commands]
        for words in commands:
            build_parser().parse_args(words)
