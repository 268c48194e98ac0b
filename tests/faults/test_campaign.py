"""A share of `make torture`: kills, failing calls and mutated files; and the inputs that it once found."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tapeless.cli.main import main

HARNESS = Path(__file__).with_name("campaign.py")
CORPUS = sorted(Path(__file__).with_name("corpus").iterdir())
READERS = {".jsonl": ["data", "info"], ".toml": ["train", "new", "--config"]}


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs LD_PRELOAD and a C compiler")
@pytest.mark.parametrize(("part", "size", "cases"), [("kills", 0.003, 3), ("failures", 0.001, 4), ("fuzzed", 0.001, 100)])
def test_a_share_of_the_campaign(part: str, size: float, cases: int):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(HARNESS), str(size), part]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(int(count) for count in re.findall(r"^0 problems in (\d+)", done.stdout, re.M)) >= cases


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_an_input_that_was_found(path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([*READERS[path.suffix], str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error[")
    assert "INTERNAL" not in said
    assert said.count("\n") == 1
