"""Processes that are killed: at random moments, and at named points. In the end each run is the one that was let be. A few
here; two hundred, and every point, in acceptance/random_kills.py and kill_points.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).with_name("killing.py")


@pytest.mark.parametrize(("what", "count"), [("random", 5), ("points", 5)])
def test_what_is_killed_goes_on_to_the_same_end(what: str, count: int):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(HARNESS), what, str(count)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) >= count
