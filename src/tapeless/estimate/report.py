"""An estimate as text. Tested by: tests/cli/test_estimate.py."""

from tapeless.config import AnyModelConfig, TrainConfig
from tapeless.estimate.fit import gib
from tapeless.estimate.record import Record
from tapeless.text import MIB, Row, rows_text, table
from tapeless.training.summary import duration, model_text

UNITS = ("", "k", "M", "G", "T", "P", "E", "Z")


def text(found: Record, config: AnyModelConfig, train: TrainConfig) -> str:
    """All but the time, the verdict first."""
    memory, disk = found["memory"], found["disk"]
    refused = {obstacle["code"]: obstacle["message"] for obstacle in found["resource_errors"]}
    fits = refused.get("TOO_LARGE") or f"{gib(memory['peak'])} of the {gib(memory['available'])} that are free: it fits"
    if "TOO_LARGE" not in refused and memory["saving"] > memory["available"]:
        fits += ", but no copy of a checkpoint does: training waits while one is written"
    kept = f"{gib(disk['checkpoint'])} a checkpoint, up to {disk['at_once']} at a time: {gib(disk['most'])}"
    if disk["free"] is not None:
        kept += f" of the {gib(disk['free'])} that are free for {disk['out_dir']}"
    flops = f"{unit(found['flops_a_step'])}FLOP a step, {unit(found['flops'])}FLOP in all, of the model's own products"
    largest = memory["largest_batch"]
    verdict = [
        *heading(found, config, train),
        ("memory", fits),
        *([] if largest is None else [("batch", f"the largest that fits: {largest} x {train.seq_len}")]),
        ("disk", refused.get("DISK_FULL") or kept),
        ("arithmetic", flops),
    ]
    return f"{rows_text(verdict)}\n\n{memory_table(found)}\n"


def heading(found: Record, config: AnyModelConfig, train: TrainConfig) -> list[Row]:
    rows = f"{train.batch_size} x {train.seq_len}" + (f" x {train.grad_accum} micro-batches" if train.grad_accum > 1 else "")
    policy = "" if train.recompute == "none" else f", recompute {train.recompute}"
    where = f"{train.dtype} on {found['memory']['device']}, ops {found['ops']}{policy}, {train.optimizer}"
    return [
        ("model", model_text(config, found["parameters"])),
        ("run", f"{found['steps']:,} steps of {rows} = {found['tokens_a_step']:,} tokens; {where}"),
    ]


def memory_table(found: Record) -> str:
    """The parts of a step, then the peaks of whatever else the run does."""
    memory = found["memory"]
    rows = [("memory", "MiB", "share")]
    step = memory["phases"]["training step"]
    rows += [(name, f"{size / MIB:,.1f}", f"{size / step:.1%}") for name, size in memory["parts"].items()]
    rows += [(f"peak, {phase}", f"{size / MIB:,.1f}", "") for phase, size in memory["phases"].items()]
    rows.append(("peak, while a checkpoint is written", f"{memory['saving'] / MIB:,.1f}", ""))
    if memory["process"]:
        most = max(memory["peak"], memory["saving"])
        rows.append(("with the process itself", f"{(most + memory['process']) / MIB:,.1f}", ""))
    return table(rows)


def time_text(found: Record) -> str:
    return rows_text(_time_rows(found))


def _time_rows(found: Record) -> list[Row]:
    time = found["time"]
    if time is None:
        return [("time", f"not known: {found['time_error']}" if "time_error" in found else "not measured (--no-calibrate)")]
    speed = f"{found['tokens_a_step'] / time['step']:,.0f} tokens/s, {unit(found['flops_a_step'] / time['step'])}FLOP/s"
    left_out = "start and gradient check" if len(time["parts"]) > 1 else "all but the steps"
    beside = ", ".join(f"{name} {duration(seconds)}" for name, seconds in time["parts"].items())
    return [
        ("step", f"{short(time['step'])}: {speed}; {time['how']}"),
        ("time", f"{duration(time['total'])}, {left_out} not included: {beside}"),
    ]


def short(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def unit(number: float) -> str:
    """3 digits and the letter of a power of 1000, such as 1.23 T."""
    power = 0
    while number >= 999.5 and power < len(UNITS) - 1:
        number, power = number / 1000, power + 1
    return f"{number:.3g} {UNITS[power]}"
