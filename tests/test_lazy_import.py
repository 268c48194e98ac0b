"""`import tapeless` and `tapeless --help` are instant: neither loads torch. A name loads its home when it is first used."""

import subprocess
import sys
from pathlib import Path

import pytest

import tapeless

LOADED = "print('torch' in sys.modules)"


def python(code: str, *arguments: str) -> str:
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_import_leaves_torch_out():
    assert python(f"import sys, tapeless; {LOADED}") == "False\n"


def test_configuration_leaves_torch_out():
    assert python(f"import sys, tapeless; tapeless.load_preset('tiny'); {LOADED}") == "False\n"


def test_a_model_brings_torch_in():
    assert python(f"import sys, tapeless; tapeless.Transformer; {LOADED}") == "True\n"


HELP = """
import sys
from tapeless.cli.main import main
try:
    status = main()
except SystemExit as end:
    status = end.code
print(status or 0, 'torch' in sys.modules)
"""


COMMANDS = [
    ["--version"],
    ["--help"],
    ["gradcheck", "--help"],
    ["train", "new", "--help"],
    ["generate", "--help"],
    ["export", "--help"],
    ["import", "--help"],
    ["bench", "--help"],
    ["report", "--help"],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_help_leaves_torch_out(arguments: list[str]):
    *text, last = python(HELP, *arguments).splitlines()
    assert text
    assert last == "0 False"


def test_the_installed_command_and_the_module_say_the_same():
    command = Path(sys.executable).parent / "tapeless"
    by_name = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)
    by_module = subprocess.run([sys.executable, "-m", "tapeless", "--help"], capture_output=True, text=True, check=True)
    assert by_name.stdout == by_module.stdout


def test_a_mistake_in_a_flag_leaves_torch_out_too():
    assert python(HELP, "train", "new", "--lr", "0").splitlines() == ["2 False"]


def test_every_public_name_is_there():
    assert dir(tapeless) == sorted(tapeless.__all__)
    assert all(getattr(tapeless, name) is not None for name in tapeless.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Transfomer'"):
        tapeless.Transfomer  # noqa: B018


def test_preparing_data_leaves_torch_out(tmp_path: Path):
    (tmp_path / "a.txt").write_text("text " * 100)
    assert python(HELP, "data", "prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")).endswith("0 False\n")
