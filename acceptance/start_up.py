"""From the command to the end of the first training step, with compiled kernels and files in memory: by phase, the median of
many starts: of llama-tiny on the CPU, on the default corpus, on a text file and on prepared data in turn; with --device cuda of
llama-124m on the default corpus."""

import argparse
import statistics
import time
from pathlib import Path

from claim import Claims, skip
from training import SHAKESPEARE, scratch, tapeless, train

from tapeless.training.metrics_log import read_metrics
from tapeless.training.run_dir import RunDir

BOUND = {"cpu": 1.5, "cuda": 6.0}  # seconds
FLAGS: dict[str, tuple[object, ...]] = {
    "cpu": ("--preset", "llama-tiny"),
    "cuda": ("--preset", "llama-124m", "--batch-size", 32, "--seq-len", 1024, "--device", "cuda", "--dtype", "bfloat16"),
}
STEP, TOTAL = "first step", "in all"


def start(folder: Path, *data: object) -> dict[str, float]:
    """Seconds by phase of one start. The total is by the clock outside of the process, and its parts by the run's own."""
    run, began = RunDir(folder), time.time()
    train(run, "--max-steps", 1, "--sample-tokens", 1, *data)
    first, step = (next(e for e in read_metrics(run.metrics) if e["event"] == kind) for kind in ("start", "step"))
    return {**first["startup_seconds"], STEP: step["time"] - first["time"], TOTAL: step["time"] - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("starts", type=int, nargs="?", default=15)
    parser.add_argument("--device", choices=list(BOUND), default="cpu")
    args = parser.parse_args()
    on_cpu, starts, bound, flags = args.device == "cpu", args.starts, BOUND[args.device], FLAGS[args.device]
    if on_cpu and not SHAKESPEARE.exists():
        skip(f"there is no {SHAKESPEARE.name}")
    claims, preset = Claims("start_up" if on_cpu else "start_up_cuda"), flags[1]
    with scratch() as folder:
        sources: dict[str, tuple[object, ...]] = {"default corpus": ()}
        if on_cpu:
            tapeless("data", "prepare", SHAKESPEARE, "--out", folder / "prepared")
            sources["text file"] = ("--dataset-path", SHAKESPEARE)
            sources["prepared data"] = ("--dataset-path", folder / "prepared")
        found: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
        for number in range(starts + 1):
            for name, data in sources.items():
                seconds = start(folder / f"{number} {name}", *flags, *data)
                if number:  # the first fills the caches
                    found[name].append(seconds)
    table = {
        name: {phase: statistics.median(s[phase] for s in all_of) for phase in all_of[0]} for name, all_of in found.items()
    }
    for name, of_phase in table.items():
        totals = [seconds[TOTAL] for seconds in found[name]]
        claims.check(
            f"{preset}, {name}: from the command to the end of the first step, median of {starts} starts, warm caches",
            bound=f"at most {bound} s",
            measured=f"{of_phase[TOTAL]:.2f} s ({min(totals):.2f} to {max(totals):.2f})",
            ok=of_phase[TOTAL] <= bound,
        )
    claims.finish(preset=preset, starts=starts, table=table)


if __name__ == "__main__":
    main()
