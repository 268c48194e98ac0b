"""Measure the results in docs/performance.md, each part into results/PART.json; acceptance/tables.py then fills the page.

python bench/run.py [PART …]        the named parts; by default all CPU parts (half an hour on two idle cores), or on a machine
                                    with a GPU all GPU parts (most of an hour, a third of it compiling max-autotune)

A part is one call of `tapeless bench`; the page is generated from its JSON. If other processes kept the machine busy, a warning
is printed with the table: measure again, since other load does not slow all contenders equally."""

import shlex
import subprocess
import sys
import time

import torch
from suite import CPU, CUDA, PARTS, RESULTS


def measure(part: str) -> bool:
    """Whether it succeeded. Contenders whose losses disagree are a failure, and their results are not written."""
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
