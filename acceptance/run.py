"""Run every acceptance script, or those named; print what each showed; exit 1 if any claim was missed.

python acceptance/run.py [NAME …]"""

import subprocess
import sys
import time
from pathlib import Path

HOME = Path(__file__).resolve().parent
NOT_CLAIMS = {"run", "claim", "tables", "performance_tables", "training", "killing", "browser", "harness"}


def main(wanted: list[str]) -> int:
    known = sorted(path.stem for path in HOME.glob("*.py") if path.stem not in NOT_CLAIMS)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        print(f"no such script: {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    missed = []
    for name in wanted or known:
        print(f"\n== {name}", flush=True)
        start = time.monotonic()
        code = subprocess.run([sys.executable, str(HOME / f"{name}.py")], check=False).returncode
        print(f"   {time.monotonic() - start:.0f} s, {'passed' if code == 0 else 'MISSED'}", flush=True)
        if code:
            missed.append(name)
    print(
        f"\n{len(wanted or known) - len(missed)} of {len(wanted or known)} passed"
        + (f"; missed: {', '.join(missed)}" if missed else "")
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
