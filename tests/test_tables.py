"""The tables in README.md and docs/ say what acceptance/results/*.json say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_no_table_is_stale():
    done = subprocess.run(
        [sys.executable, str(ROOT / "acceptance" / "tables.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
