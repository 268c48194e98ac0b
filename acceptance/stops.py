"""SIGTERM at random moments: the run that was resumed is the run that was never stopped. Kills -9: torture.py."""

import random
import signal
import subprocess
import time

from claim import Claims
from training import fingerprint, lines, scratch, start, tapeless, to_the_end

from tapeless.training.checkpoint import pointed
from tapeless.training.run_dir import RunDir

TERMS, LIMIT = 5, 25.0
STEPS = 300
FLAGS = ["--preset", "tiny", "--max-steps", STEPS, "--batch-size", 2, "--grad-accum", 2, "--seq-len", 32, "--save-every", 20]
FLAGS += ["--eval-every", 30, "--eval-windows", 16, "--sample-every", 100, "--dropout", 0.1, "--corpus", "arithmetic"]
SEED = 20


def wait_for_step(run: RunDir, step: int, process: subprocess.Popen[bytes]) -> None:
    """Until so many lines are there, or the process is through."""
    while process.poll() is None and not (run.metrics.exists() and run.metrics.read_bytes().count(b"\n") > step):
        time.sleep(0.002)


claims = Claims("stops")
with scratch() as folder:
    draw = random.Random(SEED)
    expected = RunDir(folder / "unbroken")
    to_the_end("new", *FLAGS, "--out-dir", expected.path)
    longest, good = 0.0, 0
    for n in range(TERMS):
        run = RunDir(folder / f"asked-{n}")
        process = start("new", *FLAGS, "--out-dir", run.path)
        wait_for_step(run, draw.randrange(STEPS - 50), process)
        process.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        code = process.wait()
        longest = max(longest, time.monotonic() - asked)
        taken = [event["step"] for event in lines(run, "step")]
        kept = pointed(run.checkpoints, "latest") == taken[-1] < STEPS
        resumed = tapeless("train", "resume", run.path, threads=1).code
        same = fingerprint(run) == fingerprint(expected)
        same = same and lines(run, "step", "eval", "sample") == lines(expected, "step", "eval", "sample")
        good += code == 75 and kept and resumed == 0 and same
        print(f"      SIGTERM at step {taken[-1]}: exit {code}, {'equal' if same else 'DIFFERENT'}", flush=True)
    claims.check(
        f"{TERMS} SIGTERMs: exit 75, the step saved, the resumed run equal",
        bound=f"{TERMS} of {TERMS}",
        measured=f"{good} of {TERMS}",
        ok=good == TERMS,
    )
    claims.check("the slowest exit after SIGTERM", bound=f"under {LIMIT} s", measured=f"{longest:.2f} s", ok=longest < LIMIT)
claims.finish(slowest_exit_seconds=round(longest, 2))
