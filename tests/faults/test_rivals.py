"""More than one process on a run: one writes, the others are told who it is; readers never meet a half-deleted checkpoint."""

import os
import subprocess
import sys
from pathlib import Path


def test_one_writes_and_anybody_reads():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    harness = str(Path(__file__).with_name("rivals.py"))
    done = subprocess.run([sys.executable, harness, "3"], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
