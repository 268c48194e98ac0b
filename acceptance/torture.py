"""Kills at random moments, every failing call, damage of checkpoints and of the kernel cache, mutated files, and training on a
disk that fails every second: the campaign of tests/faults/campaign.py, for hours. It needs Linux and a C compiler.

python acceptance/torture.py [SIZE] [PART …]        SIZE 0.01 does a hundredth of it
parts: kills, failures, damaged, fuzzed, cache, soak"""

import sys

import harness  # noqa: F401  puts tests/ on the path
from campaign import campaign, with_shim
from claim import Claims

with_shim()
size, parts = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0, sys.argv[2:]
claims, counts = Claims("torture"), {}
for part in campaign(size, parts):
    measured = f"{len(part.problems)} of {part.cases:,}"
    claims.check(f"{part.cases:,} {part.what}", bound="no problem", measured=measured, ok=not part.problems)
    counts[part.what] = {**part.counts, "problems": part.problems[:20]}
claims.finish(size=size, counts=counts)
