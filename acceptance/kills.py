"""Twenty kills -9 at random moments and five SIGTERMs: the run that was resumed is the run that was never stopped.

Moments are drawn over the whole life of a process, its start included; where a kill came before there was a run, it begins
again, as a person would."""

import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

from claim import Claims
from training import command, environment, lines, scratch, tapeless

from tapeless.data.files import file_sha256
from tapeless.train.checkpoint import pointed
from tapeless.train.run_dir import RunDir

KILLS, TERMS, LIMIT = 20, 5, 25.0
STEPS = 300
FLAGS = ["--preset", "tiny", "--max-steps", STEPS, "--batch-size", 2, "--grad-accum", 2, "--seq-len", 32, "--save-every", 20]
FLAGS += ["--eval-every", 30, "--eval-windows", 16, "--sample-every", 100, "--dropout", 0.1, "--corpus", "arithmetic"]
KINDS = ("step", "watch", "eval", "sample", "checkpoint")
SEED = 20


def start(*arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command("train", *arguments), env=environment(1), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def go_on(run: RunDir) -> list[object]:
    """The command that a person would type now."""
    if run.config.is_file():
        return ["resume", run.path]
    shutil.rmtree(run.path, ignore_errors=True)
    return ["new", *FLAGS, "--out-dir", run.path]


def fingerprint(run: RunDir) -> dict[str, str]:
    latest = run.checkpoints / (run.checkpoints / "latest").read_text().strip()
    return {name: file_sha256(latest / name) for name in ("model.safetensors", "optim.safetensors", "state.json")}


def wait_for_step(run: RunDir, step: int, process: subprocess.Popen[bytes]) -> None:
    """Until so many lines are there, or the process is through."""
    while process.poll() is None and not (run.metrics.exists() and run.metrics.read_bytes().count(b"\n") > step):
        time.sleep(0.002)


def killed_once(folder: Path, draw: random.Random, seconds: float) -> tuple[RunDir, int] | None:
    """Killed after a random time, and resumed to its end; with the lines it had when it was killed. None where it was through
    before that."""
    run = RunDir(folder)
    process = start("new", *FLAGS, "--out-dir", run.path)
    try:
        process.wait(draw.uniform(0.0, seconds))
        return None
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    told = run.metrics.read_bytes().count(b"\n") if run.metrics.exists() else 0
    if (code := start(*go_on(run)).wait()) != 0:
        raise SystemExit(f"the command behind a kill failed with exit status {code}")
    return run, told


claims = Claims("kills")
with scratch() as folder:
    draw = random.Random(SEED)
    expected = RunDir(folder / "unbroken")
    began = time.monotonic()
    if (code := start("new", *FLAGS, "--out-dir", expected.path).wait()) != 0:
        raise SystemExit(f"the unbroken run failed with exit status {code}")
    whole = time.monotonic() - began
    kills, equal, attempts = [], 0, 0
    while len(kills) < KILLS:
        attempts += 1
        killed = killed_once(folder / f"killed-{attempts}", draw, whole)
        if killed is None:
            continue
        run, told = killed
        kills.append(told)
        same = fingerprint(run) == fingerprint(expected) and lines(run, *KINDS) == lines(expected, *KINDS)
        equal += same
        print(f"      kill {len(kills)}, {told} lines written: {'equal' if same else 'DIFFERENT'}", flush=True)
    claims.check(
        f"{KILLS} kills -9 at random moments: model, optimizer and state hash equal to the unbroken run's, no line of the "
        "metrics lost or doubled",
        bound=f"{KILLS} of {KILLS}",
        measured=f"{equal} of {KILLS}",
        ok=equal == KILLS,
    )

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
claims.finish(lines_written_before_the_kill=kills, slowest_exit_seconds=round(longest, 2))
