"""Console output of a run, from the events of metrics.jsonl.

    Display         plain, aligned lines: for a file or a pipe, or without rich
    LiveDisplay     a progress bar with the current metrics below it; evaluations and samples scroll above
    NotebookDisplay in Jupyter: the same, evaluations and samples below it, by IPython alone
    JsonDisplay     every event as a line of JSON on stdout, and nothing else
    SilentDisplay   nothing; warnings are logged
Tested by: tests/train/test_display.py."""

import logging
import os
import sys
import time
from collections.abc import Collection, Mapping
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapeless import progress
from tapeless.data.baselines import Baselines
from tapeless.errors import ConfigError
from tapeless.plugins import required_plugins
from tapeless.text import LABEL, WIDTH, Row, printable, readable, rows_text
from tapeless.training.metrics_log import event_line
from tapeless.training.resources import format_bytes, resident_bytes
from tapeless.training.summary import command_lines, count, duration, introduction, named_losses, next_commands
from tapeless.training.trainer import Trainer

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

log = logging.getLogger("tapeless")
SMOOTHING = 0.95  # of the loss from step to step: about the mean of the last 20
BARS = "▁▂▃▄▅▆▇█"
COLUMNS = f"{'step':>8} {'loss':>8} {'smoothed':>9} {'norm':>8} {'lr':>9} {'tokens/s':>9} {'left':>13} {'memory':>9}"
UPDATE = 0.25  # seconds between updates in a notebook


def make_display(kind: str | None, log_every: int) -> "Display":
    """kind: auto (live in a terminal or a notebook, else plain), plain, json, or None for no output at all."""
    if kind not in ("auto", "plain", "json", None):
        raise ConfigError(f"display is {kind!r}; expected auto, plain, json or None")
    if kind in ("json", None):
        return JsonDisplay() if kind else SilentDisplay()
    if kind == "plain":
        return Display(log_every)
    if in_notebook():
        return NotebookDisplay(log_every)
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return Display(log_every, "plain lines, since the output is not a terminal")
    if find_spec("rich") is None:
        return Display(log_every, "plain lines; for a live display: pip install rich")
    return LiveDisplay()


def in_notebook() -> bool:
    """Whether IPython runs this code for a notebook, and not in a terminal."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class Progress:
    """Current metrics, updated by every event."""

    def __init__(self, first_step: int = 0, total_steps: int = 0):
        self.first, self.total, self.started = first_step, total_steps, time.monotonic()
        self.step: Mapping[str, Any] = {}
        self.eval: Mapping[str, Any] = {}
        self.losses: list[float] = []  # smoothed, one per step
        self._mean = self._pace = 0.0  # smoothed loss, and seconds a token

    def take(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "step":
            self.step = event
            n = len(self.losses) + 1
            self._mean = SMOOTHING * self._mean + (1 - SMOOTHING) * event["loss"]
            self._pace = SMOOTHING * self._pace + (1 - SMOOTHING) / event["tokens_per_second"]
            self.losses.append(self._mean / (1 - SMOOTHING**n))
        elif event["event"] == "eval":
            self.eval = event

    @property
    def tokens_per_second(self) -> float:
        return (1 - SMOOTHING ** len(self.losses)) / self._pace

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def left(self) -> str:
        """Remaining time at the average speed so far, including evaluations."""
        taken = self.step["step"] - self.first
        return duration(self.seconds / max(taken, 1) * (self.total - self.step["step"]))


class Display:
    """Plain lines on stdout; warnings on stderr."""

    def __init__(self, log_every: int = 1, reason: str = ""):
        self.log_every, self.reason = log_every, reason
        self.progress = Progress()
        self.baselines: Baselines | None = None

    def __enter__(self) -> "Display":
        self.progress.started = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, trainer: Trainer) -> None:
        self.progress = Progress(trainer.steps, trainer.total_steps)

    def introduce(self, run: Path | None, trainer: Trainer, baselines: Baselines) -> None:
        self.baselines = baselines
        self.begin(trainer)
        self.rows([*introduction(run, trainer, baselines), *([("display", self.reason)] if self.reason else [])])

    def verified(self, checks: int, failed: Collection[object]) -> None:
        """The result of the gradient check. failed: the findings of verify/ that are not ok."""
        for finding in failed:
            self.warn(str(finding))
        text = f"{len(failed)} of {checks} checks FAILED on the first batch; nothing was trained"
        if not failed:
            text = f"correct on the first batch, by complex step and float64: {count(checks, 'check')}"
        self.rows([("gradients", text)])

    def event(self, event: Mapping[str, Any]) -> None:
        self.progress.take(event)
        if event["event"] == "step":
            self.step_taken()
        elif event["event"] == "eval":
            self.evaluated()
        elif event["event"] == "sample":
            self.sampled(event)
        elif "warning" in event:
            self.warn(event["warning"])

    def step_taken(self) -> None:
        p, step = self.progress, self.progress.step["step"]
        if len(p.losses) == 1:
            print(f"\n{COLUMNS}")
        if len(p.losses) == 1 or step % self.log_every == 0 or step == p.total:
            print(self.step_text(), flush=True)

    def step_text(self) -> str:
        """The last step, below COLUMNS."""
        p, s = self.progress, self.progress.step
        numbers = f"{s['step']:>8} {s['loss']:>8.4f} {p.losses[-1]:>9.4f} {s['grad_norm']:>8.3f} {s['lr']:>9.2e}"
        return f"{numbers} {p.tokens_per_second:>9,.0f} {p.left:>13} {memory():>9}"

    def evaluated(self) -> None:
        print(f"{self.progress.eval['step']:>8} {self.evaluation_text()}", flush=True)

    def evaluation_text(self) -> str:
        found = self.progress.eval
        best = (
            "" if found["best"] is None else "new best" if found["val_loss"] == found["best"] else f"best {found['best']:.4f}"
        )
        if 0 < found["step"] == self.progress.first:
            best = "as before"  # a checkpoint is from before its step's evaluation, which a resume therefore repeats
        return f"validation {found['val_loss']:.4f}   {best:<11}   {metrics_text(found)}"

    def sampled(self, event: Mapping[str, Any]) -> None:
        print(f"{event['step']:>8} sample")
        print(framed(event["text"], " " * 9 + "| ", WIDTH), flush=True)

    def warn(self, text: str) -> None:
        print(f"warning: {printable(text)}", file=sys.stderr, flush=True)

    def close(self, run: Path | None, trainer: Trainer, ending: str) -> None:
        print()
        self.rows(self.closing(trainer, ending))
        if run is not None:
            print()
            page = run / "report.html"
            rows = [("report", str(page))] if page.is_file() else []
            plugins = required_plugins(trainer.model.config, trainer.config)
            lines = command_lines(next_commands(run, ending, trainer.total_steps, trainer.functions, plugins))
            self.rows([*rows, ("run", str(run)), *(("", line) for line in lines)])

    def closing(self, trainer: Trainer, ending: str) -> list[Row]:
        """How the run ended, and its loss compared with the baselines."""
        steps, total, patience = trainer.steps, trainer.total_steps, trainer.config.patience
        why = f"max_time {trainer.config.max_time} reached" if trainer.out_of_time else "as requested"
        how = {
            "done": f"{count(steps, 'step')}",
            "early": f"at step {steps:,} of {total:,}: no new best in {count(patience, 'evaluation')}",
            "stopped": f"at step {steps:,} of {total:,}, {why}; a checkpoint is saved",
        }
        rows = [(ending, f"{how[ending]}, {duration(self.progress.seconds)}")]
        found = self.progress.eval
        if found:
            windows = f"on {count(len(trainer.validation), 'fixed window')} at step {found['step']:,}"
            rows.append(("validation", f"{found['val_loss']:.4f}   {metrics_text(found)}; {windows}"))
            if trainer.best_step is not None and trainer.best_step != found["step"]:
                rows.append(("best", f"{trainer.best_val_loss:.4f}   at step {trainer.best_step:,}"))
        assert self.baselines is not None
        own = trainer.data.source_loss(trainer.validation)
        if own is not None:
            rows.append(("source", f"{versus(own, found)}: loss of the true source on the same windows"))
        return rows + [(name, versus(value, found)) for name, value in reversed(named_losses(trainer.data, self.baselines)[:3])]

    def rows(self, rows: list[Row]) -> None:
        print(rows_text(rows), flush=True)


def metrics_text(found: Mapping[str, Any]) -> str:
    average = f"; averaged weights {found['ema_val_loss']:.4f}" if "ema_val_loss" in found else ""
    return f"perplexity {found['perplexity']:,.2f}, {found['bits_per_byte']:.3f} bits per byte{average}"


def versus(value: float, found: Mapping[str, Any]) -> str:
    """A baseline, and how far the validation loss is from it."""
    percent = 100 * (found["val_loss"] / value - 1) if found and value > 0 else 0.0
    where = f"   the validation loss is {abs(percent):.1f} % {'below' if percent < 0 else 'above'}"
    return f"{value:.4f}{where if percent else ''}"


def framed(text: str, margin: str, width: int) -> str:
    """A sample as printable lines, with a margin."""
    columns = max(width - len(margin), 20)
    lines = [line[i : i + columns] for line in readable(text).split("\n") for i in range(0, max(len(line), 1), columns)]
    return "\n".join(margin + line for line in lines)


def memory() -> str:
    size = resident_bytes()
    return "?" if size is None else format_bytes(size)


def curve(values: list[float], width: int) -> str:
    """The values as a row of bars: each is the mean of an equal share, scaled between the lowest and the highest."""
    if len(values) < width:
        return ""
    means = []
    for i in range(width):
        part = values[i * len(values) // width : (i + 1) * len(values) // width]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    return "".join(BARS[int((mean - low) / max(high - low, 1e-9) * (len(BARS) - 1) + 0.5)] for mean in means)


class LiveDisplay(Display):
    """For a terminal, with rich."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console

        self.console = Console(highlight=False)
        self._live: Any = None

    def __enter__(self) -> "LiveDisplay":
        from rich.live import Live

        super().__enter__()
        self._progress = progress.shown(False)  # the panel shows it
        self._progress.__enter__()
        self.console.print()
        self._live = Live(get_renderable=self.panel, console=self.console, refresh_per_second=4, transient=True)
        self._live.start()
        self.console.show_cursor(True)  # otherwise it would stay hidden after a kill
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        self._progress.__exit__(None, None, None)

    def panel(self) -> "RenderableType":
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        p = self.progress
        if not p.step:
            return Text(progress.text() or "first step …", "dim")
        s, done = p.step, f"{p.step['step']:,}/{p.total:,}"
        bar = Table.grid(padding=(0, 2), expand=True)
        bar.add_column(ratio=1)
        for _ in range(2):
            bar.add_column(no_wrap=True)
        bar.add_row(ProgressBar(p.total, s["step"], complete_style="cyan"), Text(done, "bold"), f"{p.left} left")
        first = [("loss", f"{s['loss']:.4f}", "bold"), ("smoothed", f"{p.losses[-1]:.4f}", "bold cyan")]
        if p.eval:
            first.append(("validation", f"{p.eval['val_loss']:.4f}", "bold green"))
            first.append(("best", f"{p.eval['best']:.4f}" if p.eval["best"] is not None else "none", ""))
            if p.eval["floor"] is not None:
                first.append(("floor", f"{p.eval['floor']:.4f}", ""))
        if self.baselines:
            first.append(("bigram", f"{self.baselines.bigram:.4f}", "dim"))
        second = [
            ("gradient norm", f"{s['grad_norm']:.3f}", ""),
            ("lr", f"{s['lr']:.2e}", ""),
            ("tokens/s", f"{p.tokens_per_second:,.0f}", ""),
            ("epoch", str(s["epoch"] + 1), ""),
            ("memory", memory(), ""),
        ]
        below = [Text(line, "cyan")] if (line := curve(p.losses, 48)) else []
        waiting = [Text(what, "dim")] if (what := progress.text()) else []
        return Group("", bar, fields(first), fields(second), *below, *waiting)

    def step_taken(self) -> None:
        pass  # the panel shows it

    def evaluated(self) -> None:
        self.console.print(f"[dim]{self.progress.eval['step']:>8,}[/]  {self.evaluation_text()}")

    def sampled(self, event: Mapping[str, Any]) -> None:
        from rich.text import Text

        self.console.print(f"[dim]{event['step']:>8,}[/]  sample")
        self.console.print(Text(framed(event["text"], " " * 8 + "│ ", self.console.width), "dim"))

    def warn(self, text: str) -> None:
        from rich.text import Text

        self.console.print(Text(f"warning: {printable(text)}", "yellow"))

    def rows(self, rows: list[Row]) -> None:
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 1))
        grid.add_column(style="dim", min_width=LABEL - 1, no_wrap=True)
        grid.add_column()
        for label, text in rows:
            grid.add_row(label, Text(printable(text)))
        self.console.print(grid)


class NotebookDisplay(Display):
    """For Jupyter: one area that is updated; everything else is printed below it."""

    def __enter__(self) -> "NotebookDisplay":
        from IPython.display import display

        super().__enter__()
        self._updated = self.progress.started
        self._area = display(self._content(), raw=True, display_id=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._update()

    def step_taken(self) -> None:
        if time.monotonic() - self._updated > UPDATE:
            self._update()

    def _update(self) -> None:
        self._updated = time.monotonic()
        self._area.update(self._content(), raw=True)

    def _content(self) -> dict[str, str]:
        """By MIME type; a notebook shows the HTML, a saved or converted one perhaps the text."""
        p = self.progress
        lines = [COLUMNS, self.step_text(), *filter(None, [curve(p.losses, 48)])] if p.step else ["first step …"]
        text, done = "\n".join(lines), p.step["step"] if p.step else p.first
        bar = f'<progress value="{done}" max="{p.total}" style="width: 48em; max-width: 100%"></progress>'
        return {"text/plain": text, "text/html": f'{bar}<pre style="line-height: 1.3">{escape(text)}</pre>'}


def fields(values: list[tuple[str, str, str]]) -> "Text":
    """`loss 1.2345   lr 1e-3`, the names dim."""
    from rich.text import Text

    line = Text()
    for name, value, style in values:
        line.append(f"{name} ", "dim").append(value, style).append("   ")
    line.rstrip()
    return line


class SilentDisplay(Display):
    """Prints nothing; warnings go to the logger `tapeless`."""

    def event(self, event: Mapping[str, Any]) -> None:
        if "warning" in event:
            self.warn(event["warning"])

    def introduce(self, run: Path | None, trainer: Trainer, baselines: Baselines) -> None:
        pass

    def rows(self, rows: list[Row]) -> None:
        pass

    def close(self, run: Path | None, trainer: Trainer, ending: str) -> None:
        pass

    def warn(self, text: str) -> None:
        log.warning(text)


class JsonDisplay(SilentDisplay):
    """Every event as a line of JSON on stdout; warnings also on stderr."""

    def event(self, event: Mapping[str, Any]) -> None:
        sys.stdout.write(event_line(event).decode())
        sys.stdout.flush()
        super().event(event)

    def warn(self, text: str) -> None:
        Display.warn(self, text)
