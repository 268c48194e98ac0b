"""Commands and contenders look for garbage seldom, from before torch is loaded; a library that is imported changes nothing.
Commands print what an encoding lacks as `?`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tapeless.cli.main import main
from tapeless.start import OBJECTS

SAY = "import gc, sys; print(gc.get_threshold()[0], 'torch' in sys.modules)"


def said(code: str) -> list[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_importing_the_library_changes_nothing():
    assert said(f"import tapeless; {SAY}") == [str(value) for value in (700, False)]


@pytest.mark.parametrize("module", ["tapeless", "tapeless.bench"])
def test_set_before_torch_is_loaded(module: str):
    """A hook at the first import of torch says what is set by then."""
    hook = f"""
import gc, runpy, sys
class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(gc.get_threshold()[0]); sys.stdout.flush(); sys.exit(0)
sys.meta_path.insert(0, Hook())
sys.argv = ["{module}", "train", "new", "--preset", "tiny"]
runpy.run_module("{module}", run_name="__main__", alter_sys=True)
"""
    assert said(hook) == [str(OBJECTS)]


def test_no_collection_when_a_command_is_done():
    code = "import atexit, gc, sys; atexit.register(lambda: print(gc.get_freeze_count() > 1000)); sys.argv[1:] = ['--version']"
    assert said(f"{code}; import tapeless.cli.main; tapeless.cli.main.main()")[-1] == "True"


@pytest.mark.skipif(sys.platform == "win32", reason="output is UTF-8 there")
def test_characters_that_the_output_cannot_have(tmp_path: Path):
    (tmp_path / "text.txt").write_text("жü€" * 40, encoding="utf-8")
    assert main(["data", "prepare", str(tmp_path / "text.txt"), "--out", str(tmp_path / "data"), "--tokenizer", "char"]) == 0
    command = [sys.executable, "-m", "tapeless", "data", "sample", str(tmp_path / "data"), "--count", "1", "--tokens", "6"]
    shown = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "cp1252"}, check=True).stdout
    assert sorted(shown.strip()) == sorted("??üü€€".encode("cp1252"))


def test_imports_are_frozen_only_in_a_process_of_a_command():
    code = "import gc; from tapeless.start import *; {}; import json; freeze_imports(); print(gc.get_freeze_count() > 0)"
    assert said(code.format("raise_gc_threshold()")) == ["True"]
    assert said(code.format("pass")) == ["False"]
