"""Every contender has its turn in every round; what cannot run is left out with its reason."""

from bench_fixtures import FakeWorker, task

from tapeless.bench.side_by_side import side_by_side

SPEED = {"ours": 0.01, "eager": 0.1, "compile": 5.0}


def run(names: list[str], **options) -> tuple:
    log: list = []
    tasks = [task(name) for name in names]
    found = side_by_side(
        [tasks], lambda each: FakeWorker(each, SPEED.get(each.contender, 0), log, broken=each.contender == "hf"), **options
    )
    return found, log


def test_turns_are_interleaved_and_every_second_round_goes_backwards():
    found, log = run(["ours", "eager"], rounds=3)
    first_turn = max(i for i, (_, do, _) in enumerate(log) if do == "reset") + 1
    turns = [label for label, do, _ in log[first_turn:] if do == "steps"]
    a, b = "ours float32", "eager float32"
    assert turns == [a, b, b, a, a, b]
    assert [len(measured.rounds) for measured in found.measured] == [3, 3]


def test_a_turn_lasts_about_a_second_and_its_first_step_does_not_count():
    found, log = run(["ours", "eager", "compile"], rounds=1)
    assert [len(measured.rounds[0]) for measured in found.measured] == [100, 10, 1]
    last = {label: count for label, do, count in log if do == "steps"}
    assert last == {"ours float32": 101, "eager float32": 11, "compile float32": 1}


def test_the_warm_up_of_a_slow_contender_is_one_step():
    _, log = run(["compile"], rounds=1)
    assert [count for _, do, count in log if do == "steps"] == [1, 1]


def test_memory_counts_after_the_warm_up_and_everything_is_kept():
    found, log = run(["eager"], rounds=2)
    dos = [do for _, do, _ in log]
    assert dos == ["build", "first", "steps", "steps", "reset", "steps", "steps", "finish", "close"]
    (measured,) = found.measured
    assert (measured.before, measured.peak, measured.result, measured.first_step_s) == (100, 180, 3.0, 1.5)


def test_a_contender_that_cannot_run_is_left_out():
    said: list[str] = []
    found, log = run(["ours", "hf"], rounds=1, progress=said.append)
    assert [measured.task.contender for measured in found.measured] == ["ours"]
    assert found.left_out == {"hf float32": "hf float32: cannot run"}
    assert "left out: hf float32: cannot run" in said
    assert log[-1][1] == log[-2][1] == "close"
