"""The numbers of an event, under the names by which TensorBoard, W&B and Trackio show them: the same in all three.

Tested by: tests/report/test_scalars.py."""

from tapeless.report.reporters import Event

STEP = {"loss": "loss/train", "lr": "step/lr", "grad_norm": "step/grad_norm", "tokens_per_second": "step/tokens_per_second"}
EVAL = {"val_loss": "loss/validation", "bits_per_byte": "loss/bits_per_byte"}
WATCH = {"memory_bytes": "memory/process", "device_memory_bytes": "memory/device"}
NAMES = {"step": STEP, "eval": EVAL, "layer_stats": WATCH}
GROUPED = ("grad_norm", "update_ratio")  # of a look at the layers: a number for each of them


def scalars(event: Event) -> dict[str, float]:
    """Every number of a step, an evaluation or a look; of other events none."""
    kind = event["event"]
    found = {tag: event[name] for name, tag in NAMES.get(kind, {}).items()}
    if kind == "layer_stats":
        found |= {f"{table}/{group}": value for table in GROUPED for group, value in event[table].items()}
    return {tag: float(value) for tag, value in found.items() if value is not None}  # float: NaN is text in the log


def as_markdown(text: str) -> str:
    """A sample as it stands: indented, Markdown takes it so."""
    return "".join(f"    {line}\n" for line in text.splitlines())
