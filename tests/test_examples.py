"""The examples run as they stand, and say what they promise."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def output(name: str, tmp_path: Path, *arguments: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, EXAMPLES / name, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == ""
    return run.stdout


def losses(text: str) -> tuple[float, float]:
    before, _, after = text.rsplit("loss ", 1)[1].split()
    return float(before), float(after)


def test_one_linear_layer(tmp_path: Path):
    text = output("one_linear_layer.py", tmp_path)
    rows = {line.split()[0]: line for line in text.splitlines() if line}
    for name, number in {"dw": "[[-0.5, -1.0], [2.0, 4.0]]", "db": "[-0.5, 2.0]", "dx": "[[5.5, 1.5]]"}.items():
        assert rows[name].count(number) == 2  # computed, and by hand
    assert losses(text) == (2.125, 0.34)


def test_simple_lm(tmp_path: Path):
    text = output("simple_lm.py", tmp_path)
    for name in ("embed.w", "norm.w", "norm.b", "hidden.w", "hidden.b", "head.w"):
        assert name in text
    before, after = losses(text)
    assert before > 5
    assert after < 0.1


def test_all_examples_are_tested():
    text = Path(__file__).read_text()
    assert all(f'"{path.name}"' in text for path in EXAMPLES.glob("*.py"))


def test_gated_token_shift(tmp_path: Path):
    """It registers a sublayer and prints nothing; what it computes: tests/test_plugins.py."""
    assert output("gated_token_shift.py", tmp_path) == ""


def test_instructions(tmp_path: Path):
    """Seven kinds, and no list of letters of the test is in a training conversation."""
    output("instructions.py", tmp_path, "train.jsonl", "test.jsonl")
    texts = ((tmp_path / name).read_text() for name in ("train.jsonl", "test.jsonl"))
    train, test = ([json.loads(line)["messages"] for line in text.splitlines()] for text in texts)
    assert (len(train), len(test)) == (16000, 20)
    assert len({question["content"].split()[0] for question, _ in test}) >= 5
    questions = {question["content"] for question, _ in train}
    lists = {re.search(r"(?: [a-z])+$", question).group() for question in questions}
    assert not lists & {re.search(r"(?: [a-z])+$", question["content"]).group() for question, _ in test}
