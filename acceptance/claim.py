"""A claim, its bound, what was measured, and the verdict: what every script in this folder prints and stores.

claims = Claims("parameter_counts")
claims.check("tiny has 132,224 parameters", bound=132224, measured=n, ok=n == 132224)
claims.finish(table=rows)        # writes results/parameter_counts.json; exits 1 on a miss"""

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from tapeless.bench.machine import machine

HOME = Path(__file__).resolve().parent
RESULTS = HOME / "results"
SKIPPED = 77  # the exit status of a script that needs what is not here


def skip(reason: str) -> NoReturn:
    """For a claim that only a package outside of the development set can judge; what was stored of it stays."""
    print(f"skip  {reason}", flush=True)
    sys.exit(SKIPPED)


class Claims:
    def __init__(self, name: str):
        self.name = name
        self.rows: list[dict[str, Any]] = []

    def check(self, claim: str, *, bound: Any, measured: Any, ok: bool) -> None:
        self.rows.append({"claim": claim, "bound": bound, "measured": measured, "ok": bool(ok)})
        print(f"{'pass' if ok else 'MISS'}  {claim}\n      bound {bound}, measured {measured}", flush=True)

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row["ok"] for row in self.rows)

    def finish(self, **data: Any) -> NoReturn:
        self.store(**data)
        sys.exit(0 if self.ok else 1)

    def store(self, **data: Any) -> None:
        RESULTS.mkdir(exist_ok=True)
        result = {"name": self.name, "machine": machine(), "claims": self.rows, **data}
        (RESULTS / f"{self.name}.json").write_text(json.dumps(result, indent=1) + "\n")
