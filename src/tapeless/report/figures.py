"""The numbers of a run that a report begins with.

Tested by: tests/report/test_figures.py."""

from typing import NamedTuple

from tapeless.report.history import RunHistory
from tapeless.training.info import number
from tapeless.training.memory import format_bytes
from tapeless.training.summary import duration


class Figure(NamedTuple):
    label: str
    value: str
    below: str  # what stands in small letters below it


def figures(story: RunHistory) -> list[Figure]:
    found, last, start, c = [], story.last, story.start, story.config.train
    if story.best_eval:
        found += validation(story)
    if last:
        speed = last["tokens"] / max(story.seconds, 1e-9)
        found.append(Figure("steps", f"{last['step']:,}", f"of {start['total_steps']:,}" if start else ""))
        found.append(Figure("tokens", short(last["tokens"]), f"epoch {last['epoch'] + 1}"))
        found.append(Figure("tokens per second", f"{speed:,.0f}", f"{duration(story.seconds)} in steps"))
    if start:
        found.append(Figure("parameters", short(start["parameters"]), f"{c.dtype} on {c.device}"))
    if story.peak_memory:
        found.append(
            Figure("memory", format_bytes(story.peak_memory), "held of the GPU" if story.on_device else "of the process")
        )
    return found


def validation(story: RunHistory) -> list[Figure]:
    """The best loss, and how far it is from what it has to beat, or from what it cannot."""
    best, last = story.best_eval, story.last_eval
    below = f"best, at step {best['step']:,}"
    if last["step"] != best["step"]:
        below += f"; last {number(last['val_loss'])}"
    found = [
        Figure("validation loss", number(best["val_loss"]), below),
        Figure("bits per byte", f"{float(best['bits_per_byte']):.3f}", f"perplexity {float(best['perplexity']):,.2f}"),
    ]
    if story.start:
        floor, bigram = story.start["floor"], story.start["baselines"]["bigram"]
        name, mark = ("entropy", floor) if floor else ("bigram", bigram)
        percent = 100 * (best["val_loss"] / mark - 1)
        found.append(Figure("beside its mark", f"{percent:+.1f} %", f"{name} {mark:.4f}"))
    return found


def short(n: int) -> str:
    """1.23 M."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if n >= 10 * size or (n >= size and size > 1000):
            return f"{n / size:.3g} {letter}"
    return f"{n:,}"
