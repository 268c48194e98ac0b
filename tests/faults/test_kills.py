"""Processes that are killed: at random moments, and at named points. In the end each run is the one that was let be. A few
here; five hundred, and every point, in acceptance/random_kills.py and kill_points.py."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).with_name("killing.py")


@pytest.mark.parametrize(("what", "count", "writing"), [("random", 5, 0), ("points", 5, 1)])
def test_what_is_killed_goes_on_to_the_same_end(what: str, count: int, writing: int):
    """writing: so many at least were in the writer thread, which chance decides for random moments."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(HARNESS), what, str(count)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kills, inside = (int(number) for number in re.findall(r"\d+", done.stdout)[:2])
    assert kills >= count
    assert inside >= writing
