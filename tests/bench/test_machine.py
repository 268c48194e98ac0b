"""Whose the cores were: work of this process is not held against the machine, work of another is."""

import subprocess
import sys
import time

import pytest

from tapeless.bench.machine import Others, busy_seconds

SPIN = "import time; end = time.monotonic() + 5\nwhile time.monotonic() < end: pass"

pytestmark = pytest.mark.skipif(busy_seconds() == 0, reason="the system does not say")


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_another_process_is_seen_and_this_one_is_not():
    alone = Others()
    spin(0.5)
    quiet = alone.share()
    other = subprocess.Popen([sys.executable, "-c", SPIN])
    try:
        time.sleep(0.2)
        beside = Others()
        spin(0.5)
        loud = beside.share()
    finally:
        other.kill()
        other.wait()
    assert loud > 0.1
    assert quiet < 0.9
