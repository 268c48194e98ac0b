"""A command on several ranks is the command on one, whatever happens to them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from run_fixtures import TIMES, text_file

SMALL = ["--preset", "tiny", "--set", "model.hidden_dim=16", "--set", "model.num_layers=1", "--max-seq-len", "16"]
SMALL += ["--batch-size", "6", "--no-verify", "--eval-windows", "8", "--sample-tokens", "3", "--report-to", "none"]


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "tapeless", "train", *map(str, words)]


def tapeless(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=300, check=False)


def logged(run: Path) -> list[dict[str, Any]]:
    """Every line of a run but for times, in order."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    wanted = [line for line in lines if line["event"] in ("step", "eval", "sample")]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in wanted]


def saved(run: Path) -> list[bytes]:
    latest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
    return [(latest / name).read_bytes() for name in ("model.safetensors", "optim.safetensors")]


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_command_on_ranks_is_the_command_on_one(tmp_path: Path):
    """Also if a rank is killed on the way, and if it is stopped and resumed on fewer."""
    words = [*SMALL, "--dataset-path", text_file(tmp_path, 4000), "--micro-batches", 3, "--max-steps", 600]
    words += ["--save-every", 20, "--eval-every", 30, "--sample-every", 50]
    alone, ranks = tmp_path / "alone", tmp_path / "ranks"
    assert tapeless("new", *words, "--out-dir", alone).returncode == 0
    with (tmp_path / "errors").open("w+") as errors:
        start = command("new", *words, "--out-dir", ranks, "--ranks", 3)
        running = subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=errors)
        until(lambda: (ranks / "checkpoints" / "step-00000040").is_dir())
        children = subprocess.run(["pgrep", "-P", str(running.pid)], capture_output=True, text=True, check=True).stdout
        os.kill(int(children.split()[1]), signal.SIGKILL)
        until(lambda: '"event": "resume"' in (ranks / "metrics.jsonl").read_text())
        running.send_signal(signal.SIGTERM)
        status = running.wait(60)
        errors.seek(0)
        said = errors.read()
        assert status == 75, said
    assert "rank 1 was ended by SIGKILL; all 3 continue from the last checkpoint" in said
    assert "Traceback" not in said
    assert "error" not in said
    assert tapeless("resume", ranks, "--ranks", 2).returncode == 0
    assert saved(ranks) == saved(alone)
    assert logged(ranks) == logged(alone)


def test_a_mistake_is_one_line(tmp_path: Path):
    done = tapeless("new", *SMALL, "--dataset-path", tmp_path / "missing", "--out-dir", tmp_path / "run", "--ranks", 2)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if not line.endswith("…") and " … " not in line]
    assert line.startswith("error[")
    assert "missing" in line
