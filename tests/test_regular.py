"""What is no file does not keep a command waiting, nor fill memory: it is an error of one line, wherever a file is expected."""

import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tapeless.cli.main import main

sys.path.append(str(Path(__file__).parent / "train"))  # run_fixtures
sys.path.append(str(Path(__file__).parent / "faults"))  # small_run

from small_run import new

from tapeless.regular import read_json
from tapeless.training.run_dir import RunDir

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs pipes with names")


def to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.fixture(params=[os.mkfifo, to_zeros], ids=["pipe", "zeros"])
def endless(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    return request.param


@pytest.fixture
def alarm():
    """A command that waits for a pipe is ended by the failure of its test."""
    signal.alarm(20)
    yield
    signal.alarm(0)


GIVEN = {
    "data": "data prepare {} --out {out}/prepared",
    "configuration": "train new --config {}",
    "tokenizer": "tokenizer info {}",
    "token files": "data info {}.bin",
    "a folder": "data info {out}",
}
EXPECTED = {
    "checkpoints/latest": "generate {} --max-tokens 2 --no-fallback",
    "checkpoints/step-00000006/MANIFEST.json": "generate {} --max-tokens 2 --no-fallback",
    "checkpoints/step-00000006/model.safetensors": "generate {} --max-tokens 2 --no-fallback",
    "checkpoints/step-00000006/state.json": "generate {} --max-tokens 2 --no-fallback",
    "config.toml": "train info {}",
    "tokenizer.json": "generate {} --max-tokens 2",
    "generation_config.json": "generate {} --max-tokens 2",
    "chat_template.jinja": "generate {} --max-tokens 2",
    "metrics.jsonl": "report {}",
    "data.json": "train resume {}",
    "train.bin": "train resume {}",
}


def refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(words)) in (1, 2)
    said = capsys.readouterr().err
    assert said.count("error[") == 1
    assert "INTERNAL" not in said


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("words", GIVEN.values(), ids=GIVEN)
def test_given(words: str, endless: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / ("tokens" + (".bin" if words.endswith(".bin") else ".json"))
    endless(path)
    (tmp_path / "out").mkdir()
    endless(tmp_path / "out" / "in.txt")
    refused(words.replace("{}.bin", "{}").replace("{}", str(path)).replace("{out}", str(tmp_path / "out")), capsys)


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize(("name", "words"), EXPECTED.items(), ids=EXPECTED)
def test_in_a_run(name: str, words: str, endless: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = RunDir(tmp_path / "run")
    assert new(run).status == 0
    (run.path / name).unlink(missing_ok=True)
    endless(run.path / name)
    refused(words.replace("{}", str(run.path)), capsys)


def test_json_that_is_nested_too_deeply_is_no_json(tmp_path: Path):
    (tmp_path / "nested.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(tmp_path / "nested.json")
