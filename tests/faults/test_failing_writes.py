"""Every write of a run may fail: the disk is full, failing or read-only. Nothing is lost, nobody sees a traceback, and a
failure that passes does not even end the run. test_campaign.py has calls fail in every way."""

import errno
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from failing_writes import points_of, survive, unbroken
from small_run import FLAGS, new, outcome, resume
from watched_disk import Point, watched

from tapeless.errors import WriteError
from tapeless.training.checkpoint import checkpoints
from tapeless.training.metrics_log import MetricsLog, read_metrics
from tapeless.training.run_dir import RunDir


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return unbroken(tmp_path_factory.mktemp("expected"))


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> list[Point]:
    return points_of(RunDir(tmp_path_factory.mktemp("points") / "run"))


def test_the_points_are_all_there(points: list[Point]):
    """A call that the harness does not see would never fail."""
    seen = {str(point) for point in points}
    step = "checkpoints/.tmp-step-00000002"
    for name in ("config.toml", "env.json", "data.json", "train.bin", "val.bin", "tokenizer.json", "checkpoints/latest"):
        folder, _, last = name.rpartition("/")
        temporary = f"{folder}/.tmp-{last}".lstrip("/")
        assert {f"open {temporary}", f"write {temporary}", f"fsync {temporary}", f"replace {temporary}"} <= seen
    for name in ("model.safetensors", "optim.safetensors", "state.json", "MANIFEST.json"):
        assert {f"open {step}/{name}", f"write {step}/{name}", f"fsync {step}/{name}"} <= seen
    assert {f"mkdir {step}", f"fsync {step}", f"rename {step}", "fsync checkpoints"} <= seen
    assert {"rename checkpoints/step-00000002", "rmdir checkpoints/.tmp-deleted-step-00000002"} <= seen
    assert {"open metrics.jsonl", "write metrics.jsonl", "fsync metrics.jsonl", "open lock", "write lock"} <= seen
    assert {"write samples/.tmp-step-00000003.txt", "replace checkpoints/.tmp-best"} <= seen


def first(points: list[Point], text: str) -> Point:
    return next(point for point in points if str(point) == text)


@pytest.mark.parametrize(
    ("call", "status"),
    [
        ("open .tmp-train.bin", 1),  # before the first step: nothing is lost by an error
        ("write .tmp-config.toml", 1),
        ("open lock", 1),
        ("open metrics.jsonl", 1),
        ("write lock", 0),  # its name is for people alone
        ("write metrics.jsonl", 0),
        ("fsync metrics.jsonl", 0),
        ("write checkpoints/.tmp-step-00000002/model.safetensors", 0),
        ("rename checkpoints/.tmp-step-00000002", 0),
        ("replace checkpoints/.tmp-latest", 0),
        ("replace checkpoints/.tmp-best", 0),
        ("rename checkpoints/step-00000002", 0),
        ("unlink checkpoints/.tmp-deleted-step-00000002/model.safetensors", 0),
        ("write samples/.tmp-step-00000003.txt", 0),
    ],
)
def test_what_ends_a_run_and_what_does_not(call: str, status: int, tmp_path: Path, expected: RunDir, points: list[Point]):
    point = first(points, call)
    found = survive(RunDir(tmp_path / "run"), expected, point, errno.EIO, lasting=False)
    assert (found.point, found.status, found.problems) == (point, status, [])
    assert found.writing == (call.partition(" ")[2].startswith("checkpoints/") or call == "fsync metrics.jsonl")


def test_a_log_that_fails_for_a_while_has_every_line_in_the_end(tmp_path: Path):
    path, full, warnings = tmp_path / "metrics.jsonl", True, []

    def act(point: Point) -> None:
        if full and point.call.startswith("write"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with watched(tmp_path, act):
        log = MetricsLog(path, on_warning=warnings.append)
        for step in range(1, 4):
            log.append({"event": "step", "step": step})
            log.flush()
        assert path.read_bytes() == b""
        full = False
        log.append({"event": "step", "step": 4})
        log.flush()
        assert [event["step"] for event in read_metrics(path)] == [1, 2, 3, 4]
        full = True
        log.append({"event": "step", "step": 5})
        log.flush()
        log.append({"event": "step", "step": 6})  # never flushed
        with pytest.raises(WriteError, match=r"No space left on device; its last 2 lines are lost"):
            log.close()
    assert len(warnings) == 2
    assert warnings[0] == f"{path} cannot be written: No space left on device; its lines are buffered, training continues"


def test_a_sync_that_fails_is_said_once_and_loses_nothing(tmp_path: Path):
    warnings: list[str] = []

    def act(point: Point) -> None:
        if point.call.startswith("fsync"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with watched(tmp_path, act), MetricsLog(tmp_path / "metrics.jsonl", on_warning=warnings.append) as log:
        for step in range(1, 4):
            log.append({"event": "step", "step": step})
            log.sync()
            log.flush()
        log.sync()  # and closing raises nothing, since every line is in the file
    assert warnings == [f"{log.path} cannot be synced to the disk: Input/output error; training continues"]
    assert [event["step"] for event in read_metrics(log.path)] == [1, 2, 3]


def test_a_full_disk_never_takes_the_run_with_it(tmp_path: Path, expected: RunDir):
    """No line of the log was ever written, and the last save fails: the checkpoints before it stay all the same."""
    run = RunDir(tmp_path / "run")

    def act(point: Point) -> None:
        if (point.name == "metrics.jsonl" and point.call != "open") or "step-00000006" in point.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with watched(run.path, act):
        said = new(run)
    assert said.status == 1
    assert "error[WRITE]" in said.words
    assert "earlier checkpoints are unchanged" in said.words
    assert list(checkpoints(run.checkpoints))[-1] == 4
    words = r"the checkpoint of step 6 is in (\S+); to continue, free some space, then: (cp -r \S+ \S+) && (.*)"
    found = re.search(words, said.words)
    assert found
    assert Path(found[1]).parent == Path(tempfile.gettempdir())
    subprocess.run(shlex.split(found[2]), check=True)  # with the lines of the log that were not written
    assert found[3].startswith("tapeless train resume")
    assert resume(run).status == 0
    assert outcome(run) == outcome(expected)


def test_a_write_error_is_an_oserror_too():
    assert issubclass(WriteError, OSError)
    assert WriteError.exit_status == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["lines", "json"])
def test_output_into_a_full_disk(tmp_path: Path, flags: list[str], expected: RunDir):
    """`tapeless train new > log`, and the log is on the disk that filled up."""
    data = str(expected.path.parent / "text.txt")
    words = ["train", "new", *FLAGS, "--dataset-path", data, "--out-dir", str(tmp_path / "run"), *flags]
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "tapeless", *words], stdout=full, stderr=subprocess.PIPE, text=True)
    said = [line for line in done.stderr.splitlines() if " …" not in line]  # those come where the machine is slow
    warning = "warning: stdout cannot be written: No space left on device; training continues"
    assert (done.returncode, said) == (0, [warning])
    assert outcome(RunDir(tmp_path / "run")) == outcome(expected)
