"""Run every acceptance script, or those named; print what each showed; exit 1 if any claim was missed.

python acceptance/run.py [NAME …]"""

import subprocess
import sys
import time
from pathlib import Path

from claim import SKIPPED

HOME = Path(__file__).resolve().parent
NOT_CLAIMS = {"run", "claim", "tables", "performance_tables", "training", "browser", "harness", "gguf_worker"}
NOT_CLAIMS |= {"fine_tuning_worker", "torture"}  # torture takes hours: `make torture`


def main(wanted: list[str]) -> int:
    known = sorted(path.stem for path in HOME.glob("*.py") if path.stem not in NOT_CLAIMS)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        print(f"no such script: {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    missed, skipped = [], 0
    for name in wanted or known:
        print(f"\n== {name}", flush=True)
        start = time.monotonic()
        code = subprocess.run([sys.executable, str(HOME / f"{name}.py")], check=False).returncode
        verdict = {0: "passed", SKIPPED: "skipped"}.get(code, "MISSED")
        print(f"   {time.monotonic() - start:.0f} s, {verdict}", flush=True)
        skipped += code == SKIPPED
        if verdict == "MISSED":
            missed.append(name)
    print(
        f"\n{len(wanted or known) - len(missed) - skipped} of {len(wanted or known)} passed"
        + (f"; skipped: {skipped}" if skipped else "")
        + (f"; missed: {', '.join(missed)}" if missed else "")
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
