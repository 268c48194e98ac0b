"""What the scripts about training share: run the command, read what it wrote. Every run lives in a temporary folder."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tapeless.data.files import file_sha256
from tapeless.training.metrics_log import read_metrics
from tapeless.training.run_dir import RunDir

SHAKESPEARE = Path(__file__).resolve().parents[2] / "shared" / "data" / "shakespeare.txt"
# what no two runs agree on
TIMES = {"time", "startup_seconds", "step_seconds", "tokens_per_second", "memory_bytes", "device_memory_bytes"}


class Done(NamedTuple):
    code: int
    seconds: float
    output: str


def tapeless(*arguments: object, threads: int | None = None) -> Done:
    """Run the command as a process of its own, and wait for it."""
    start = time.monotonic()
    done = subprocess.run(
        command(*arguments), env=environment(threads), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return Done(done.returncode, time.monotonic() - start, done.stdout)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tapeless", *map(str, arguments)]


def environment(threads: int | None) -> dict[str, str]:
    return os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})


def start(*arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command("train", *arguments), env=environment(1), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def to_the_end(*arguments: object) -> None:
    if (code := start(*arguments).wait()) != 0:
        raise SystemExit(f"tapeless train {arguments[0]} failed with exit status {code}")


def train(run: RunDir, *arguments: object, threads: int | None = None) -> Done:
    """A new run; it has to succeed."""
    done = tapeless("train", "new", "--out-dir", run.path, *arguments, threads=threads)
    if done.code:
        sys.exit(f"{done.output}\nthe run failed with exit status {done.code}")
    return done


@contextmanager
def scratch() -> Iterator[Path]:
    with TemporaryDirectory(prefix="tapeless-") as folder:
        yield Path(folder)


def steps(run: RunDir, key: str) -> list[float]:
    return [event[key] for event in read_metrics(run.metrics) if event["event"] == "step"]


def of_kind(run: RunDir, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_metrics(run.metrics) if event["event"] == kind]


def lines(run: RunDir, *kinds: str) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock says, by step and kind: the line of a checkpoint comes when it is written."""
    found = [event for event in read_metrics(run.metrics) if event["event"] in kinds]
    found.sort(key=lambda event: (event["step"], kinds.index(event["event"])))
    return [{key: value for key, value in event.items() if key not in TIMES} for event in found]


def fingerprint(run: RunDir) -> dict[str, str]:
    """Hashes of the newest checkpoint: equal weights, moments and counts are equal bytes."""
    latest = run.checkpoints / (run.checkpoints / "latest").read_text().strip()
    return {name: file_sha256(latest / name) for name in ("model.safetensors", "optim.safetensors", "state.json")}


def evaluation(run: RunDir, which: str = "latest") -> dict[str, Any]:
    """`tapeless eval`, on the whole validation part, with the baselines."""
    done = tapeless("eval", run.path, "--checkpoint", which, "--json")
    if done.code:
        sys.exit(done.output)
    return json.loads(done.output.splitlines()[-1])


def smoothed(losses: list[float], last: int = 50) -> float:
    """The mean of the last losses: one batch says little."""
    return sum(losses[-last:]) / len(losses[-last:])


def load_average() -> float:
    """Of the last minute: beside times, it says how far other work disturbed them. A run of ours alone makes about 2."""
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else float("nan")


def library_text(size: int) -> str:
    """The beginning of this Python's own sources, so many characters."""
    from tapeless.data.corpora import stdlib

    return "\n".join(stdlib().values())[:size]
