"""From measured seconds to what is said about them: medians with spread, ratios, verdicts, and whether losses agree.

Everything is plain data, as it is written to a file with --json; report.py makes text of it.
Tested by: tests/bench/test_summary.py, tests/bench/test_mfu.py."""

from collections.abc import Iterator, Sequence
from statistics import median, quantiles
from typing import Any

import torch

from tapeless.bench.device import is_cuda
from tapeless.bench.side_by_side import Comparison, Measured
from tapeless.bench.task import FLOOR, OURS, PEERS, Task
from tapeless.config.hardware import bf16_peak
from tapeless.model.build import step_flops

LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "fp8": 2e-2}  # relative, between contenders of one dtype

Row = dict[str, Any]


def quartiles(values: Sequence[float]) -> list[float]:  # the lower and the upper
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return [low, high]


def row(measured: Measured) -> Row:
    """One contender in numbers."""
    task, seconds = measured.task, [s for turn in measured.rounds for s in turn]
    middle = median(seconds)
    known = sum(measured.parts.values())
    above = measured.peak - measured.before
    return {
        "contender": task.contender,
        "dtype": task.train.dtype,
        "group": measured.group,
        "median_s": middle,
        "quartiles_s": quartiles(seconds),
        "round_medians_s": [median(turn) for turn in measured.rounds],
        "steps": len(seconds),
        "others": max(measured.others),
        "tokens_per_s": task.tokens / middle,
        "mfu": gpu_utilization(task, middle),
        "first_step_s": measured.first_step_s,
        "result": measured.result,
        "before_bytes": measured.before,
        "peak_bytes": above,  # on top of the libraries
        "reserved_bytes": measured.reserved,
        "parts_bytes": {**measured.parts, "rest": above - known} if measured.parts else {},
        "facts": measured.facts,
    }


def gpu_utilization(task: Task, seconds: float) -> float | None:
    """None on a CPU, of a floor, of a generation, of fp8, whose matmuls have two peaks, and on a GPU of unknown peak."""
    if task.new_tokens or task.contender == FLOOR or task.train.dtype == "fp8" or not is_cuda(task.train.device):
        return None
    return utilization(task, seconds, torch.cuda.get_device_name(task.train.device))


def utilization(task: Task, seconds: float, gpu: str) -> float | None:
    """Model FLOPs utilization: the share of the GPU's peak that the model's own FLOPs (model/build.py) amount to."""
    peak = bf16_peak(gpu)
    return None if peak is None else step_flops(task.model, task.tokens, task.seq_len) / seconds / peak


def named(row: Row) -> str:
    return f"{row['contender']} {row['dtype']}"


def versus(ours: Row, other: Row) -> Row:
    """How many times faster ours is: the ratio of medians, and the quartiles of the ratio round by round."""
    by_round = [b / a for a, b in zip(ours["round_medians_s"], other["round_medians_s"], strict=True)]
    return {
        "ours": named(ours),
        "peer": named(other),
        "group": ours["group"],
        "ratio": other["median_s"] / ours["median_s"],
        "quartiles": quartiles(by_round),
        "memory_ratio": ours["peak_bytes"] / other["peak_bytes"] if other["peak_bytes"] > 0 else None,
        "reserved_ratio": ours["reserved_bytes"] / other["reserved_bytes"] if other["reserved_bytes"] else None,
    }


def ratios(rows: Sequence[Row]) -> list[Row]:
    """Ours against every peer that was alive with it."""
    return [
        versus(ours, other)
        for ours in rows
        for other in rows
        if ours["contender"] == OURS and other["contender"] in PEERS and ours["group"] == other["group"]
    ]


def verdicts(pairs: Sequence[Row]) -> Iterator[Row]:
    """Each of ours against its best peer, the one hardest to beat; among all, and among those of its own dtype."""
    for name in dict.fromkeys(pair["ours"] for pair in pairs):
        against = [pair for pair in pairs if pair["ours"] == name]
        alike = [pair for pair in against if pair["peer"].split()[1] == name.split()[1]]
        yield {"among": "all", **min(against, key=lambda pair: pair["ratio"])}
        if alike:
            yield {"among": "its dtype", **min(alike, key=lambda pair: pair["ratio"])}


def disagreements(rows: Sequence[Row]) -> list[str]:
    """Where contenders of one dtype did not compute the same: losses within a tolerance, tokens exactly (in float32)."""
    wrong = []
    for dtype, tolerance in LOSS_TOLERANCE.items():
        having = [row for row in rows if row["dtype"] == dtype and row["result"] is not None]
        for other in having[1:]:
            first, second = having[0]["result"], other["result"]
            if isinstance(first, list):
                same = first == second or dtype != "float32"
            else:
                same = abs(first - second) <= tolerance * abs(first)
            if not same:
                wrong.append(f"{named(having[0])} gives {first}, {named(other)} gives {second}")
    return wrong


def summary(comparison: Comparison) -> Row:
    rows = [row(measured) for measured in comparison.measured]
    pairs = ratios(rows)
    return {
        "contenders": rows,
        "ratios": pairs,
        "verdicts": list(verdicts(pairs)),
        "disagreements": disagreements(rows),
        "left_out": comparison.left_out,
        "busy": max((row["others"] for row in rows), default=0.0),
    }
