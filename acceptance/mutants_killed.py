"""`make mutants`: every planted bug is found, nearly all by two independent levels."""

import json
import os
import subprocess
import sys

from claim import Claims
from harness import TESTS

SHARE = 0.95

claims = Claims("mutants_killed")
done = subprocess.run(
    [sys.executable, "-m", "mutants", "--json"],
    stdout=subprocess.PIPE,
    text=True,
    check=False,
    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))},
)
results = json.loads(done.stdout)["mutants"]
killed = [mutant for mutant in results if mutant["killed_by"]]
twice = [mutant for mutant in results if len(mutant["killed_by"]) >= 2]
claims.check("exit status", bound=0, measured=done.returncode, ok=done.returncode == 0)
claims.check("mutants killed", bound=len(results), measured=len(killed), ok=len(killed) == len(results) > 0)
share = len(twice) / len(results)
claims.check("killed by two independent levels", bound=SHARE, measured=round(share, 3), ok=share >= SHARE)
claims.finish(mutants=results)
