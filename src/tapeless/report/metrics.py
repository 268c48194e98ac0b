"""Every number that a run logs: its event and key in metrics.jsonl, its label and unit, and where it is shown.

metrics.csv, TensorBoard, W&B, Trackio and the page all read this table.
Tested by: tests/report/test_metrics.py."""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

Event = Mapping[str, Any]


class Metric(NamedTuple):
    event: str
    key: str
    label: str
    unit: str = ""
    tag: str | None = None  # its name in TensorBoard, W&B and Trackio; None: not sent to them
    curve: bool = False  # on the page
    optional: bool = False  # not in every event of its kind
    per_layer: bool = False  # a number for each layer, under its name; not in metrics.csv


METRICS = (
    Metric("step", "step", "step"),
    Metric("step", "epoch", "epoch"),
    Metric("step", "tokens", "tokens"),
    Metric("step", "loss", "training loss", "nats per token", "loss/train", curve=True),
    Metric("step", "lr", "learning rate", "", "step/lr", curve=True),
    Metric("step", "grad_norm", "gradient norm", "before clipping, log scale", "step/grad_norm", curve=True),
    Metric("step", "step_seconds", "step time", "seconds"),
    Metric("step", "tokens_per_second", "throughput", "tokens per second", "step/tokens_per_second", curve=True),
    Metric("step", "time", "time", "seconds since 1970"),
    Metric("eval", "val_loss", "validation loss", "nats per token", "loss/validation", curve=True),
    Metric("eval", "perplexity", "perplexity"),
    Metric("eval", "bits_per_byte", "bits per byte", "comparable across tokenizers", "loss/bits_per_byte", curve=True),
    Metric("eval", "ema_val_loss", "EMA validation loss", "nats per token", "loss/validation_ema", curve=True, optional=True),
    Metric("layer_stats", "memory_bytes", "process memory", "bytes", "memory/process"),
    Metric("layer_stats", "device_memory_bytes", "GPU memory", "bytes", "memory/device"),
    Metric("layer_stats", "grad_norm", "gradient norm by layer", "last value at the right", "grad_norm", per_layer=True),
    Metric("layer_stats", "update_ratio", "update / weight by layer", "|Δw| / |w| per step", "update_ratio", per_layer=True),
)


@cache
def curves(event: str) -> tuple[Metric, ...]:
    """The metrics of an event that the page draws."""
    return tuple(metric for metric in METRICS if metric.event == event and metric.curve)


def scalars(event: Event) -> dict[str, float]:
    """The numbers of an event by tag, the same for TensorBoard, W&B and Trackio; none for other kinds of event."""
    found: dict[str, Any] = {}
    for metric in METRICS:
        value = event.get(metric.key) if metric.event == event["event"] and metric.tag else None
        if metric.per_layer and value is not None:
            found |= {f"{metric.tag}/{layer}": number for layer, number in value.items()}
        elif value is not None:
            found[str(metric.tag)] = value
    return {tag: float(value) for tag, value in found.items()}  # float: NaN is text in metrics.jsonl


def as_markdown(text: str) -> str:
    """A sample as an indented block, which Markdown shows verbatim."""
    return "".join(f"    {line}\n" for line in text.splitlines())
