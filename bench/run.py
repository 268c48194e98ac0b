"""Measure what docs/performance.md publishes, each part into results/PART.json; then acceptance/tables.py fills the page.

python bench/run.py [PART …]        those named; without a name the CPU's, half an hour on two quiet cores, or on a machine with
                                    a GPU the GPU's, most of an hour, a third of it the compiling of max-autotune

A part is a call of `tapeless bench`; what it prints is what the page is made of. On a machine that does something else
besides, it says so above its table: measure again, since contenders do not suffer alike."""

import shlex
import subprocess
import sys
import time

import torch
from suite import CPU, CUDA, PARTS, RESULTS


def measure(part: str) -> bool:
    """Whether all went well: contenders that did not compute the same are a failure, and nothing is published of them."""
    print(f"\n== {part}", flush=True)
    start, file = time.monotonic(), RESULTS / f"{part}.json"
    fresh = file.with_suffix(".new")
    command = [sys.executable, "-m", "tapeless", "bench", *shlex.split(PARTS[part]), "--json", str(fresh)]
    ok = subprocess.run(command, check=False).returncode == 0
    if ok:
        fresh.replace(file)
    fresh.unlink(missing_ok=True)
    print(f"   {time.monotonic() - start:.0f} s, {'measured' if ok else 'FAILED'}", flush=True)
    return ok


def main(wanted: list[str]) -> int:
    unknown = [part for part in wanted if part not in PARTS]
    if unknown:
        print(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    RESULTS.mkdir(exist_ok=True)
    done = [measure(part) for part in wanted or (CUDA if torch.cuda.is_available() else CPU)]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
