"""The protocol with a process that is really there: answers, failures, and an end that leaves nothing behind."""

import sys

import pytest
from bench_fixtures import task

from tapeless.bench.process import Process, environment
from tapeless.errors import WorkerError

ECHO = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "die":
        print("no memory left", file=sys.stderr)
        sys.exit(7)
    answer = {"error": "ValueError: no"} if request["do"] == "fail" else {"got": request}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def worker():
    with Process(task(), environment(task(), None), [sys.executable, "-c", ECHO]) as process:
        yield process


def test_a_question_has_its_answer(worker: Process):
    assert worker.ask("steps", count=3) == {"got": {"do": "steps", "count": 3}}
    assert worker.ask("reset") == {"got": {"do": "reset"}}
    assert worker.since_start() > 0


def test_a_failure_is_an_error_and_the_worker_lives(worker: Process):
    with pytest.raises(WorkerError, match="ours float32: ValueError: no"):
        worker.ask("fail")
    assert worker.ask("reset") == {"got": {"do": "reset"}}


def test_a_death_is_an_error_with_the_last_words():
    with Process(task(), environment(task(), None), [sys.executable, "-c", ECHO]) as process:
        for _ in range(2):  # also when asked again
            with pytest.raises(WorkerError, match="status 7: no memory left"):
                process.ask("die")


def test_peers_wait_as_torch_does_and_ours_as_the_command_does(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    for contender in ("eager", "compile", "hf", "floor"):
        assert not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environment(task(contender), None).keys()
    assert environment(task("ours"), None)["GOMP_SPINCOUNT"] == "10000"


def test_threads_and_caches():
    here = environment(task(), 3, "folder")
    assert (here["OMP_NUM_THREADS"], here["NUMBA_NUM_THREADS"]) == ("3", "3")
    assert here["NUMBA_CACHE_DIR"] == "folder/NUMBA_CACHE_DIR"
    assert here["TORCHINDUCTOR_CACHE_DIR"] != here["NUMBA_CACHE_DIR"]
