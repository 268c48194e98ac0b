"""Processes that are asked to stop: exit 75 and not a step lost; in the end the bytes of the run that was let be. Kills are in
tests/faults."""

import contextlib
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_fixtures import events, final_bytes, text_file

from tapeless.training.checkpoint import pointed
from tapeless.training.metrics_log import read_metrics
from tapeless.training.run_dir import RunDir
from tapeless.training.signals import SIGNALS, Interrupted, StopSignals

STEPS = 80
FLAGS = shlex.split(
    "--hidden-dim 16 --num-layers 2 --num-heads 2 --intermediate-dim 24 --max-seq-len 16 --dropout 0.1 --no-verify "
    f"--max-steps {STEPS} --batch-size 4 --grad-accum 2 --save-every 10 --eval-every 15 --sample-every 40"
)
PATIENCE = 60.0  # seconds until a test gives up; nothing is measured


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tapeless", "train", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> int:
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode in (0, 75), errors
    return process.returncode


def new(path: Path, data: str, *more: str) -> subprocess.Popen[str]:
    return start("new", *FLAGS, "--dataset-path", data, "--out-dir", str(path), *more)


def wait_for_lines(run: RunDir, count: int, process: subprocess.Popen[str]) -> None:
    """Until metrics.jsonl has so many lines."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        if run.metrics.exists() and run.metrics.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.002)
    pytest.fail(f"the run came to its end, or nowhere, before line {count}")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return text_file(tmp_path_factory.mktemp("data"), 4000)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, data: str) -> RunDir:
    run = RunDir(tmp_path_factory.mktemp("runs") / "unbroken")
    assert finish(new(run.path, data)) == 0
    return run


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_asked_to_stop_it_saves_and_exits_75(number: signal.Signals, tmp_path: Path, data: str, unbroken: RunDir):
    run = RunDir(tmp_path / "run")
    process = new(run.path, data)
    wait_for_lines(run, random.Random(number).randint(5, STEPS - 40), process)
    process.send_signal(number)
    assert finish(process) == 75
    stopped = list(read_metrics(run.metrics))
    last_step = max(event["step"] for event in stopped if event["event"] == "step")
    assert stopped[-1]["event"] == "end"
    assert stopped[-1]["reason"] == "stopped"
    assert pointed(run.checkpoints, "latest") == last_step < STEPS  # not a step lost
    assert finish(start("resume", str(run.path))) == 0
    assert final_bytes(run) == final_bytes(unbroken)
    assert events(run, ["step", "eval", "sample"]) == events(unbroken, ["step", "eval", "sample"])


def test_killed_with_muon_and_an_average_of_the_weights(tmp_path: Path, data: str):
    more, draw = ["--optimizer", "muon", "--ema-decay", "0.9"], random.Random(time.time_ns())
    expected, run = RunDir(tmp_path / "unbroken"), RunDir(tmp_path / "run")
    assert finish(new(expected.path, data, *more)) == 0
    process = new(run.path, data, *more)
    wait_for_lines(run, draw.randint(12, STEPS - 20), process)
    process.kill()
    process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGKILL
    assert finish(start("resume", str(run.path))) == 0
    assert final_bytes(run) == final_bytes(expected)
    assert events(run) == events(expected)


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks_and_the_second_would_end_it(number: signal.Signals):
    before = [signal.getsignal(each) for each in SIGNALS]
    with StopSignals() as stop:
        assert not stop.requested()
        signal.raise_signal(number)
        assert stop.requested()
        assert stop.received == number
        assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert [signal.getsignal(each) for each in SIGNALS] == before


@pytest.mark.usefixtures("handlers")
@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has none")
def test_a_closing_terminal_sends_two_and_nohup_none(monkeypatch: pytest.MonkeyPatch):
    with StopSignals(says=None) as stop:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)  # by the shell, after the kernel's
        assert stop.received == signal.SIGHUP
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals(says=None) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested()
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("handlers")
def test_before_there_is_a_step_to_lose_it_raises():
    with StopSignals(raises=True, says=None) as outer:
        assert StopSignals.interrupts()
        with StopSignals(says=None) as inner:
            assert not StopSignals.interrupts()
            signal.raise_signal(signal.SIGTERM)
            assert inner.requested()
        assert not outer.requested()
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGTERM)
    with StopSignals(raises=True, says=None):
        with contextlib.suppress(Interrupted):  # as an import may
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted):
            StopSignals(says=None).__enter__()


@pytest.mark.skipif(os.name != "posix", reason="sent to a process")
def test_it_is_acknowledged_once_while_the_main_thread_is_in_a_long_call():
    code = """
import ctypes, sys
from tapeless.training.signals import Interrupted, StopSignals, acknowledging
with acknowledging():
    try:
        with StopSignals(raises=True, says="stopping"):
            print("ready", flush=True)
            for _ in range(3):
                ctypes.CDLL(None).sleep(1)  # is interrupted, but Python's handler waits for its end
    except Interrupted:
        sys.exit(75)
"""
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (75, "SIGTERM received: stopping; a second signal ends this at once\n")
