"""The key figures at the top of a report.

Tested by: tests/report/test_figures.py."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tapeless.report.history import RunHistory
from tapeless.training.info import number
from tapeless.training.resources import format_bytes
from tapeless.training.summary import duration


class Figure(NamedTuple):
    label: str
    value: str
    below: str  # the small print


def figures(history: RunHistory) -> list[Figure]:
    found, last, start, c = [], history.last, history.start, history.config.train
    if history.best_eval:
        found += validation(history)
    if last:
        speed = last["tokens"] / max(history.seconds, 1e-9)
        found.append(Figure("steps", f"{last['step']:,}", f"of {start['total_steps']:,}" if start else ""))
        found.append(Figure("tokens", short(last["tokens"]), f"epoch {last['epoch'] + 1}"))
        found.append(Figure("tokens per second", f"{speed:,.0f}", f"{duration(history.seconds)} in steps"))
    if start:
        found.append(Figure("parameters", short(start["parameters"]), f"{c.dtype} on {c.device}"))
    if history.peak_memory:
        found.append(Figure("memory", format_bytes(history.peak_memory), "GPU" if history.on_device else "process"))
    return found


def validation(history: RunHistory) -> list[Figure]:
    """The best loss, and its distance from the baseline, or from the source's entropy if that is known."""
    best, last = history.best_eval, history.last_eval
    below = _at(best)
    if last["step"] != best["step"]:
        below += f"; last {number(last['val_loss'])}"
    found = [
        Figure("validation loss", number(best["val_loss"]), below),
        Figure("bits per byte", f"{float(best['bits_per_byte']):.3f}", f"perplexity {float(best['perplexity']):,.2f}"),
    ]
    if history.best_ema:
        found.insert(1, Figure("EMA validation loss", number(history.best_ema["ema_val_loss"]), _at(history.best_ema)))
    if history.start:
        floor, bigram = history.start["floor"], history.start["baselines"]["bigram"]
        name, baseline = ("entropy", floor) if floor else ("bigram", bigram)
        percent = 100 * (best["val_loss"] / baseline - 1)
        found.append(Figure(f"vs. {name}", f"{percent:+.1f} %", f"{name} {baseline:.4f}"))
    return found


def _at(best: Mapping[str, Any]) -> str:
    return f"best, at step {best['step']:,}"


def short(n: int) -> str:
    """1.23 M."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if n >= 10 * size or (n >= size and size > 1000):
            return f"{n / size:.3g} {letter}"
    return f"{n:,}"
