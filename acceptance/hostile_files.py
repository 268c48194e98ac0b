"""Mutated Hugging Face directories through the reader: no crash, no hang, no traceback, and no more memory than there is.

python acceptance/hostile_files.py [MUTATIONS]        20,000 by default, in processes whose memory is limited"""

import json
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec

from claim import Claims, skip
from harness import TESTS
from training import scratch

BATCH, LIMIT = 1000, 10.0  # mutations in a process; seconds that one may take
MEMORY = 2 << 30  # bytes that reading may add to a process

WORKER = """
import json, resource, sys, time
from collections import Counter
from pathlib import Path

from hostile import base_directories, judged, mutants
from tapeless.data.bpe import train_bpe

folder, first, last, memory = Path(sys.argv[1]), *map(int, sys.argv[2:])
bases = base_directories(folder, train_bpe(["the quick brown fox jumps over the lazy dog, " * 20], 290))
now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + memory, now + memory))
found, slowest, defects = Counter(), 0.0, []
for seed, done, mutant in mutants(bases, folder, range(first, last)):
    began = time.monotonic()
    try:
        found[judged(mutant)] += 1
    except BaseException as error:
        defects.append(f"seed {seed}, {done}: {type(error).__name__}: {error}"[:300])
    slowest = max(slowest, time.monotonic() - began)
print(json.dumps({"found": found, "slowest": slowest, "defects": defects}))
"""

if find_spec("tokenizers") is None or not os.path.exists("/proc/self/statm"):
    skip("needs the package tokenizers, and Linux to limit memory")
mutations = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
path = os.pathsep.join(filter(None, [str(TESTS / "faults"), os.environ.get("PYTHONPATH")]))
found: Counter[str] = Counter()
slowest, crashes, defects, noise = 0.0, [], [], ""
for first in range(0, mutations, BATCH):
    with scratch() as folder:
        span = [str(first), str(min(first + BATCH, mutations)), str(MEMORY)]
        done = subprocess.run(
            [sys.executable, "-c", WORKER, str(folder), *span],
            capture_output=True,
            text=True,
            check=False,
            timeout=BATCH * LIMIT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )
    noise += done.stderr
    if done.returncode:
        crashes.append(f"mutations from {first} on: exit status {done.returncode}")
        continue
    said = json.loads(done.stdout.splitlines()[-1])
    found.update(said["found"])
    slowest = max(slowest, said["slowest"])
    defects += said["defects"]
    print(f"      {first + BATCH:,}: {dict(found)}", flush=True)
claims = Claims("hostile_files")
judged = sum(found.values())
claims.check(
    f"{mutations:,} mutated directories: a model, or a one-line tapeless error",
    bound=f"{mutations:,}",
    measured=f"{judged:,}: {dict(sorted(found.items()))}" + "".join(f"; {text}" for text in defects[:5]),
    ok=judged == mutations,
)
claims.check("processes that crashed", bound=0, measured=crashes or 0, ok=not crashes)
claims.check("written on stderr", bound="nothing", measured=noise[-300:] or "nothing", ok=not noise)
claims.check("the slowest", bound=f"under {LIMIT} s", measured=f"{slowest:.2f} s", ok=slowest < LIMIT)
claims.finish(outcomes=dict(found), slowest_seconds=round(slowest, 3))
