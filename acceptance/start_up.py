"""From the command to the end of the first training step, with compiled kernels and files in memory: by phase, the median of
many starts of llama-tiny, on the default corpus, on a text file and on prepared data in turn."""

import statistics
import time
from pathlib import Path

from claim import Claims, skip
from harness import argument
from training import SHAKESPEARE, scratch, tapeless, train

from tapeless.training.metrics_log import read_metrics
from tapeless.training.run_dir import RunDir

PRESET, BOUND = "llama-tiny", 1.5  # seconds
STEP, TOTAL = "first step", "in all"


def start(folder: Path, *data: object) -> dict[str, float]:
    """Seconds by phase of one start. The total is by the clock outside of the process, and its parts by the run's own."""
    run, began = RunDir(folder), time.time()
    train(run, "--preset", PRESET, "--max-steps", 1, "--sample-tokens", 1, *data)
    first, step = (next(e for e in read_metrics(run.metrics) if e["event"] == kind) for kind in ("start", "step"))
    return {**first["startup_seconds"], STEP: step["time"] - first["time"], TOTAL: step["time"] - began}


def main() -> None:
    if not SHAKESPEARE.exists():
        skip(f"there is no {SHAKESPEARE.name}")
    starts = argument(15)
    claims = Claims("start_up")
    with scratch() as folder:
        tapeless("data", "prepare", SHAKESPEARE, "--out", folder / "prepared")
        sources = {
            "default corpus": (),
            "text file": ("--dataset-path", SHAKESPEARE),
            "prepared data": ("--dataset-path", folder / "prepared"),
        }
        found: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
        for number in range(starts + 1):
            for name, data in sources.items():
                seconds = start(folder / f"{number} {name}", *data)
                if number:  # the first fills the caches
                    found[name].append(seconds)
    table = {
        name: {phase: statistics.median(s[phase] for s in all_of) for phase in all_of[0]} for name, all_of in found.items()
    }
    for name, of_phase in table.items():
        totals = [seconds[TOTAL] for seconds in found[name]]
        claims.check(
            f"{PRESET}, {name}: from the command to the end of the first step, median of {starts} starts, warm caches",
            bound=f"at most {BOUND} s",
            measured=f"{of_phase[TOTAL]:.2f} s ({min(totals):.2f} to {max(totals):.2f})",
            ok=of_phase[TOTAL] <= BOUND,
        )
    claims.finish(preset=PRESET, starts=starts, table=table)


if __name__ == "__main__":
    main()
