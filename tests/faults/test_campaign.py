"""A share of `make torture`: kills, failing calls and mutated files; and the inputs that it once found."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import World, make_subjects

from tapeless.cli.main import main

HARNESS = Path(__file__).with_name("campaign.py")
CORPUS = sorted(Path(__file__).with_name("corpus").iterdir())


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs LD_PRELOAD and a C compiler")
def test_kills_and_failing_calls():
    words = [sys.executable, str(HARNESS), "0.0015", "share"]
    done = subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n0 problems in 2 kills" in f"\n{done.stdout}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    make_subjects(folder)
    world = World(folder)
    world.learn()
    return world


def test_mutated_files(world: World):
    ends = set()
    for number in range(60):
        found = world.case(number)
        assert found.problems == [], f"python tests/faults/fuzz.py {number}"
        ends.add(found.end)
    assert {"done", "DATA", "UNTRUSTED_FILE"} <= ends


def test_a_change_that_nobody_notices_would_be_found(world: World, monkeypatch: pytest.MonkeyPatch):
    command = "generate {} --max-tokens 4 --json --ops reference"

    def flipped(number: int) -> tuple[str, str, str, list[str]]:
        world.fresh(world.folder / "run")
        weights = world.mutant / "checkpoints" / "step-00000006" / "model.safetensors"
        content = weights.read_bytes()
        weights.write_bytes(content[:-4000] + content[-2000:] + content[-4000:-2000])  # weights in another order
        return "run", "flip", command, world.argv(command)

    monkeypatch.setattr(world, "draw", flipped)
    assert world.case(0).problems == []
    monkeypatch.setattr("tapeless.training.checkpoint._problem", lambda *_: None)
    assert world.case(0).problems == ["silently another result"]


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_an_input_that_was_found(path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", "new", "--config", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error[")
    assert "INTERNAL" not in said
    assert said.count("\n") == 1
