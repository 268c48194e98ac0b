"""What the scripts about faults and mutants share: the modules of tests/, which the tests use for a few cases of each and these
scripts for all. `argument()` is a smaller number for a try, such as `python acceptance/one_writer.py 2`."""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path += [str(TESTS), str(TESTS / "faults"), str(TESTS / "train")]


def argument(default: int) -> int:
    return int(sys.argv[1]) if len(sys.argv) > 1 else default


def no_waiting_for_the_disk() -> None:
    """Where calls fail on purpose nothing is cut off, so nobody has to wait for what the operating system already has."""
    os.fsync = lambda descriptor: None


def verdict(problems: list[str], cases: int) -> str:
    """`600 of 600`, after each problem was printed."""
    for problem in problems:
        print(f"      {problem}", flush=True)
    return f"{cases - len(problems)} of {cases}"
