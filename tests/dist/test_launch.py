"""A command on several ranks is the command on one, whatever happens to them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from run_fixtures import TIMES, text_file

from tapeless.dist.launch import launch

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


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A command whose three ranks wait for ever and mind no signal but SIGKILL, and their process ids."""
    (tmp_path / "tapeless").mkdir()
    waits = "import os, pathlib, signal, time\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\n"
    waits += f"pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).write_text(str(os.getpid()))\ntime.sleep(100)"
    (tmp_path / "tapeless" / "__main__.py").write_text(waits)
    (tmp_path / "tapeless" / "__init__.py").touch()
    code = "import sys; from tapeless.dist.launch import launch; import os; os.environ['PYTHONPATH'] = sys.argv[1]\n"
    code += "sys.exit(launch([], 3, saved=lambda: ''))"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    until(lambda: all((tmp_path / str(rank)).exists() and (tmp_path / str(rank)).read_text() for rank in range(3)), 30)
    ids = [int((tmp_path / str(rank)).read_text()) for rank in range(3)]
    yield process, ids
    process.kill()
    for each in filter(alive, ids):
        os.kill(each, signal.SIGKILL)


def alive(process: int) -> bool:
    return Path(f"/proc/{process}/cmdline").exists() and bool(Path(f"/proc/{process}/cmdline").read_bytes())


def test_a_second_signal_ends_ranks_that_wait(started: tuple[subprocess.Popen[bytes], list[int]]):
    process, ranks = started
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 128 + signal.SIGKILL
    assert not any(map(alive, ranks))


def test_ranks_that_cannot_all_be_started_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    real, begun = subprocess.Popen, list[Any]()

    def refused(*args: Any, **options: Any) -> Any:
        if begun:
            raise OSError("no more processes")
        begun.append(real([sys.executable, "-c", "import time; time.sleep(100)"]))
        return begun[0]

    monkeypatch.setattr(subprocess, "Popen", refused)
    with pytest.raises(OSError, match="no more processes"):
        launch([], 2, saved=lambda: "")
    assert begun[0].poll() is not None


def test_a_mistake_is_one_line(tmp_path: Path):
    done = tapeless("new", *SMALL, "--dataset-path", tmp_path / "missing", "--out-dir", tmp_path / "run", "--ranks", 2)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if not line.endswith("…") and " … " not in line]
    assert line.startswith("error[")
    assert "missing" in line
