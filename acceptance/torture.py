"""Kills at random moments, every failing call, damage of checkpoints and of the kernel cache, mutated files, and training on a
disk that fails every second: the campaign of tests/faults/campaign.py, for hours. It needs Linux and a C compiler.

python acceptance/torture.py [SIZE] [PART …]        SIZE 0.01 does a hundredth of it
parts: kills, failures, damaged, fuzzed, cache, soak; each has a file of its own, results/torture_PART.json, so that they may be
run one after the other or, on several cores, at once."""

import sys

import harness  # noqa: F401  puts tests/ on the path
from campaign import PARTS, campaign, with_shim
from claim import Claims

with_shim()
size, parts = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0, sys.argv[2:]
missed = False
for name in parts or PARTS:
    claims, counts = Claims(f"torture_{name}"), {}
    for part in campaign(size, [name]):
        measured = f"{len(part.problems)} of {part.cases:,}"
        claims.check(f"{part.cases:,} {part.what}", bound="no problem", measured=measured, ok=not part.problems)
        counts[part.what] = {**part.counts, "problems": part.problems[:20]}
        claims.store(size=size, counts=counts)
    missed |= not claims.ok
sys.exit(1 if missed else 0)
