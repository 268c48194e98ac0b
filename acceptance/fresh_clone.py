"""A fresh clone of what is committed: `make test` alone sets everything up and passes, the suite in under ten minutes."""

import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

from claim import HOME, Claims

LIMIT = 600

claims = Claims("fresh_clone")
with tempfile.TemporaryDirectory() as folder:
    clone = Path(folder) / "tapeless"
    subprocess.run(["git", "clone", "-q", str(HOME.parent), str(clone)], check=True)
    environment = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
    start = time.monotonic()
    done = subprocess.run(["make", "test"], cwd=clone, env=environment, capture_output=True, text=True, check=False)
    total = time.monotonic() - start
    print(done.stdout[-1500:], done.stderr[-1500:])
    claims.check(
        "make test in a fresh clone with a fresh environment",
        bound="exit 0",
        measured=f"exit {done.returncode}",
        ok=done.returncode == 0,
    )
    closing = re.search(r"(\d+) passed.* in ([\d.]+)s", done.stdout)
    suite = float(closing[2]) if closing else float("inf")
    claims.check("the suite's own time", bound=f"under {LIMIT} s", measured=f"{suite:.0f} s", ok=suite < LIMIT)
claims.finish(seconds_in_all=round(total), seconds_of_the_suite=round(suite), tests_passed=int(closing[1]) if closing else 0)
