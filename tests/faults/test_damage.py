"""Damaged checkpoints: found, named, survived, left as they are; and the run that goes on comes to the same end. A hundred
cases here, two thousand in `make torture`."""

import shutil
from pathlib import Path

import pytest
from checkpoint_fixtures import save_at
from damage import DAMAGES, Case, damage, good_files, problems
from small_run import command, new, outcome, resume

from tapeless.cli.main import main
from tapeless.training.run_dir import RunDir

CASES = 100


def test_a_hundred_cases(tmp_path: Path):
    original, copy = tmp_path / "original", tmp_path / "copy"
    for step in (10, 20, 30):
        save_at(original, step)
    good = good_files(original)
    for number in range(CASES):
        shutil.copytree(original, copy)
        case = damage(copy, number)
        assert problems(copy, case, good) == [], f"case {number}: {case.words}"
        shutil.rmtree(copy)
    assert len(DAMAGES) < CASES  # each kind comes by


def test_no_damage_no_complaint(tmp_path: Path):
    for step in (10, 20, 30):
        save_at(tmp_path, step)
    assert len(problems(tmp_path, Case("nothing", "MANIFEST.json"), good_files(tmp_path))) == 2  # named nowhere


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = RunDir(tmp_path_factory.mktemp("whole") / "run")
    assert new(run, "--keep-last", "9").status == 0
    return run


def damaged_copy(whole: RunDir, name: str, number: int) -> RunDir:
    run = RunDir(shutil.copytree(whole.path, whole.path.with_name(name)))
    damage(run.checkpoints, number)
    return run


@pytest.mark.parametrize("number", range(1000, 1000 + len(DAMAGES), 3))
def test_a_damaged_run_goes_on_to_the_same_end(whole: RunDir, number: int):
    run = damaged_copy(whole, f"damaged-{number}", number)
    said = resume(run)
    assert (said.status, "warning: " in said.words) == (0, True), said.words
    assert outcome(run) == outcome(whole)


def test_no_fallback_refuses_everywhere(whole: RunDir, capsys: pytest.CaptureFixture[str]):
    run = RunDir(shutil.copytree(whole.path, whole.path.with_name("refused")))
    (run.checkpoints / "step-00000006" / "optim.safetensors").write_bytes(b"")
    for words in (["train", "resume"], ["eval"], ["generate"]):
        assert main([*words, str(run.path), "--no-fallback"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error[DAMAGED]: ")
        assert "optim.safetensors: expected" in error
    assert main(["eval", str(run.path)]) == 0
    assert "instead, " in capsys.readouterr().err


def test_checkpoints_that_are_gone_are_not_begun_again_in_silence(whole: RunDir):
    for name, keep in (("no-folders", ["latest", "best"]), ("nothing", [])):
        run = RunDir(shutil.copytree(whole.path, whole.path.with_name(name)))
        for path in run.checkpoints.iterdir():
            if path.name not in keep:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        lines = run.metrics.read_bytes()
        said = resume(run)
        assert said.status == 2
        assert "the run's checkpoints are missing; restore them, or start a new run" in said.words
        assert run.metrics.read_bytes() == lines


@pytest.mark.parametrize("content", [b"step-00000002\n", b"step-00000004\n", b"rubbish", b"step-" + b"9" * 5000, None])
def test_a_stale_best_is_put_right(whole: RunDir, content: bytes | None, tmp_path: Path):
    expected = (whole.checkpoints / "best").read_bytes()
    run = RunDir(shutil.copytree(whole.path, tmp_path / "run"))
    best = run.checkpoints / "best"
    best.unlink() if content is None else best.write_bytes(content)
    assert resume(run, "--override", "max_steps=7").status == 0
    assert best.read_bytes() in (expected, b"step-00000007\n")


def test_a_damaged_log_does_not_keep_a_run_from_going_on(whole: RunDir, tmp_path: Path):
    run = RunDir(shutil.copytree(whole.path, tmp_path / "run"))
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    damaged = b"".join([*lines[:2], b"\0\0\n", b"3\n", b'{"step": 2}\n', *lines[3:]])
    run.metrics.write_bytes(damaged)
    said = resume(run)
    assert said.status == 0
    assert "3 lines cannot be read (3, 4, 5); a copy is metrics.jsonl.damaged-1" in said.words
    assert (run.path / "metrics.jsonl.damaged-1").read_bytes() == damaged


OTHERS = ["config.toml", "data.json", "train.bin", "val.bin", "tokenizer.json", "metrics.jsonl", "env.json", "lock"]


@pytest.mark.parametrize("name", OTHERS)
def test_other_files_of_a_run_give_no_traceback(whole: RunDir, name: str, tmp_path: Path):
    """Cut, flipped or overwritten, the run goes on or is refused in one line, and its checkpoints stay what they are."""
    run = RunDir(shutil.copytree(whole.path, tmp_path / "run"))
    file, good = run.path / name, good_files(whole.checkpoints)
    content = file.read_bytes()
    middle = len(content) // 2
    for bad in (b"", content[:middle], content[:middle] + b"\xff" + content[middle + 1 :], b"[]", b"\0" * len(content)):
        file.write_bytes(bad)
        for action in ("info", "resume"):
            said = command(action, str(run.path))
            assert said.status in (0, 2), said.words
            assert "INTERNAL" not in said.words
        assert good_files(run.checkpoints) == good


def test_data_of_another_run_are_refused(whole: RunDir, tmp_path: Path):
    run = RunDir(shutil.copytree(whole.path, tmp_path / "run"))
    (tmp_path / "text.txt").write_text("other words, and many of them; " * 40)
    other = RunDir(tmp_path / "other")
    assert new(other).status == 0
    for name in ("data.json", "train.bin", "val.bin", "tokenizer.json"):
        shutil.copyfile(other.path / name, run.path / name)
    said = resume(run)
    assert said.status == 2
    assert "data.dataset_fingerprint" in said.words
