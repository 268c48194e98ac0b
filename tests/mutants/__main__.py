"""Plant every known bug, one at a time, and print which levels find it.

    make mutants                                    those of the reference ops and the code around them
    PYTHONPATH=tests python -m mutants --ops cpu    those of a set of kernels
    PYTHONPATH=tests python -m mutants 28           one of them, by its number or name, and what the levels say

Exit status: 0 every bug is found (and nearly all by two levels), 3 one is not, 2 there is no such mutant."""

import argparse
import json
import sys

from levels import LEVELS
from mutants.run import TWO_LEVELS, MutantResult, run_mutants, share_killed_twice, survivors
from mutants.table import mutants_of
from tapeless.verify.fixtures import Setting
from tapeless.verify.gradcheck import one_thread
from tapeless.verify.hf_levels import missing
from tapeless.verify.kernel_levels import op_set

FAILED = 3


def show(result: MutantResult) -> None:
    marks = "  ".join(level if level in result.killed_by else "··" for level in LEVELS)
    print(f"{result.number:>4}  {marks}  {result.name}", file=sys.stderr, flush=True)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("mutant", nargs="?", metavar="MUTANT", help="the number or name of one mutant (default all)")
    parser.add_argument("--ops", metavar="TEXT", default="reference", help="the set of ops the bugs are in (default reference)")
    parser.add_argument("--device", metavar="TEXT", default="cpu", help="where the levels run (default cpu)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    args = parser.parse_args(words)
    on = Setting(args.ops, args.device)
    on = on._replace(ops=op_set(on).name)
    names = {mutant.name: mutant.number for mutant in mutants_of(on.ops)}
    if not names or args.mutant not in [None, *names, *names.values()]:
        parser.error(f"unknown mutant {args.mutant!r}; of ops {on.ops} there are {', '.join(names.values()) or 'none'}")
    if reason := missing():
        print(f"L3 is skipped: {reason}", file=sys.stderr)
    with one_thread():
        results = run_mutants(names.get(args.mutant, args.mutant), show, on)
    alive, twice = survivors(results), share_killed_twice(results)
    if args.json:
        print(json.dumps({**on._asdict(), "mutants": [result._asdict() for result in results]}))
    elif args.mutant:
        print("\n".join(results[0].killed_by.values()) or "no level noticed")
    else:
        print(f"{len(results) - len(alive)} of {len(results)} mutants killed, {twice:.0%} by two or more levels")
    return FAILED if alive or (args.mutant is None and twice < TWO_LEVELS) else 0


if __name__ == "__main__":
    sys.exit(main())
