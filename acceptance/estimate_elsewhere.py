"""Estimates for a GPU that is not here, against what one H200 showed: the stored measurements of bench/results/cuda-*.json.

Memory: what torch reserved at the peak of two or more steps, by the dry run on this machine, to 3 %. Time: the median step,
by the formula of estimate/computed_time.py, whose shares come from these very steps, to 5 %. The largest batch lies between
sizes that fitted and sizes that did not. Then how soon the verdict is there for a model that does not fit, and that the
measuring after it ends and is never silent for long. None of this needs a GPU."""

import json
import subprocess
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from claim import Claims
from training import command, tapeless

from tapeless.config import ModelConfig, TrainConfig
from tapeless.config.hardware import GPUS
from tapeless.estimate.computed_time import ERROR, computed_time
from tapeless.estimate.memory import MIB, memory_of
from tapeless.estimate.target import Target

STORED = Path(__file__).resolve().parents[1] / "bench" / "results"
MEMORY_BOUND = 0.03
VERDICT, SILENCE, WHOLE = 10.0, 1.5, 90.0  # seconds
H200 = Target("h200", GPUS["h200"].free, GPUS["h200"])
TRIED = {"bfloat16": (512, 542), "fp8": (512, 577)}  # rows of llama-124m: that fitted, and that did not (docs/performance.md)
TOO_LARGE = ["--preset", "llama-1b", "--batch-size", "16"]


def stored() -> list[dict[str, Any]]:
    """Every measured step of ours: model, size, dtype, bytes, seconds. Later groups repeat the first."""
    rows = []
    for path in sorted(STORED.glob("cuda-*.json")):
        found = json.loads(path.read_text())
        if found["kind"] != "training":
            continue
        size = {"batch_size": found["batch_size"], "seq_len": found["seq_len"], "recompute": found["recompute"]}
        rows += [
            {"file": path.name, "name": found["name"], "model": found["model"], "size": size, **row}
            for row in found["contenders"]
            if row["contender"] == "ours" and row["group"] == 0
        ]
    return rows


def check_measured(claims: Claims) -> list[dict[str, Any]]:
    table = []
    for row in stored():
        config = ModelConfig(**row["model"])
        train = TrainConfig(**row["size"], dtype=row["dtype"], device="cuda", verify=False)
        memory = memory_of(config, train, H200)
        predicted, measured = memory.phases["training step"], row["reserved_bytes"]
        seconds = computed_time(config, train, H200, memory.ops, 1)["step"]
        off, late = predicted / measured - 1, seconds / row["median_s"] - 1
        what = f"{row['name']} {train.batch_size}x{train.seq_len} {row['dtype']} ({row['file']})"
        claims.check(
            f"{what}: {measured / MIB:,.0f} MiB reserved on an H200, predicted {predicted / MIB:,.0f}",
            bound=f"within {MEMORY_BOUND:.0%}",
            measured=f"{off:+.2%}",
            ok=abs(off) <= MEMORY_BOUND,
        )
        claims.check(
            f"{what}: a step of {1e3 * row['median_s']:.3g} ms, computed {1e3 * seconds:.3g}",
            bound=f"within {ERROR:.0%}",
            measured=f"{late:+.1%}",
            ok=abs(late) <= ERROR,
        )
        table.append({"what": what, "bytes": [predicted, measured], "seconds": [seconds, row["median_s"]]})
    return table


def check_largest_batch(claims: Claims) -> None:
    """Of steps alone, as it was tried."""
    config = ModelConfig(**next(row["model"] for row in stored() if row["name"] == "llama-124m"))
    for dtype, (good, bad) in TRIED.items():
        train = {"seq_len": 1024, "dtype": dtype, "device": "cuda", "verify": False}
        needs = [memory_of(config, TrainConfig(batch_size=n, **train), H200).phases["training step"] for n in (good, bad)]
        claims.check(
            f"llama-124m in {dtype} on an H200: {good} rows fitted, {bad} did not; predicted "
            f"{needs[0] / MIB:,.0f} and {needs[1] / MIB:,.0f} MiB",
            bound=f"{H200.room / MIB:,.0f} MiB lie between",
            measured=" and ".join("fits" if need <= H200.room else "does not" for need in needs),
            ok=needs[0] <= H200.room < needs[1],
        )


def check_verdicts(claims: Claims) -> None:
    for words in (
        ["estimate", *TOO_LARGE, "--no-calibrate"],
        ["estimate", *TOO_LARGE, "--device", "h100", "--dtype", "bfloat16"],
        ["estimate", *TOO_LARGE, "--memory", "24GB", "--dtype", "bfloat16"],
        ["presets"],
    ):
        within(claims, f"tapeless {' '.join(words)}", tapeless(*words).seconds, VERDICT)


def within(claims: Claims, what: str, seconds: float, most: float) -> None:
    claims.check(what, bound=f"at most {most:g} s", measured=f"{seconds:.1f} s", ok=seconds <= most)


def check_calibration(claims: Claims) -> dict[str, float]:
    """When the verdict, the progress and the time come."""
    process = subprocess.Popen(command("estimate", *TOO_LARGE), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    start, said, answered = time.monotonic(), list[float](), list[float]()

    def listen(stream: Any) -> None:
        said.extend(time.monotonic() - start for _ in stream)

    thread = threading.Thread(target=listen, args=[process.stderr])
    thread.start()
    lines = []
    for line in process.stdout:
        answered.append(time.monotonic() - start)
        lines.append(line)
    process.wait()
    thread.join()
    whole = time.monotonic() - start
    verdict, silence = answered[0], max(b - a for a, b in pairwise([0.0, *sorted(said + answered)]))
    what = f"tapeless estimate {' '.join(TOO_LARGE)}"
    within(claims, f"{what}: the verdict", verdict, VERDICT)
    within(claims, f"{what}: the longest silence", silence, SILENCE)
    within(claims, f"{what}: the end ({' '.join(''.join(lines[-4:]).split())})", whole, WHOLE)
    return {"verdict": verdict, "silence": silence, "whole": whole}


if __name__ == "__main__":
    claims = Claims("estimate_elsewhere")
    table = check_measured(claims)
    check_largest_batch(claims)
    check_verdicts(claims)
    claims.finish(measured=table, calibration=check_calibration(claims))
