"""Faster and leaner than the autograd one would use instead, on a CPU: the claims about bench/results, measured if missing."""

import json
import subprocess
import sys

from claim import HOME, Claims
from performance_tables import GENERATION, PEERS, RESULTS, TRAINING, best

from tapeless.bench.summary import named

# model -> ratio to the best peer of any dtype, ratio to the best float32 peer in float32, share of the best peer's memory
BOUNDS: dict[str, tuple[float, float, float | None]] = {
    "llama-tiny": (2.0, 1.3, None),
    "llama-cllm": (1.6, 1.1, 0.9),
    "llama-small": (1.6, 1.3, 0.85),
    "llama-base": (1.4, 1.1, 0.9),
}
GENERATES = {"llama-tiny": 3.0, "llama-small": 3.0, "llama-base": 1.3}  # model -> ratio to transformers, same dtype
# Seconds to the first step: until it begins, which is its end less a steady step, and until it ends.
BOUND_OF_FIRST = {"warm": 3.0, "cold": 30.0}

missing = [part for part in (*TRAINING, *GENERATION) if not (RESULTS / f"{part}.json").exists()]
if missing:
    subprocess.run([sys.executable, str(HOME.parent / "bench" / "run.py"), *missing], check=True)


def measured(part: str) -> dict:
    return json.loads((RESULTS / f"{part}.json").read_text())


claims = Claims("cpu_speed")
for name, (ratio, in_float32, memory) in BOUNDS.items():
    result = measured(name)
    pair, alike = best(result), best(result, "float32", "float32")
    there = {named(row) for row in result["contenders"]}
    expected = {f"{peer} {dtype}" for peer in PEERS for dtype in ("float32", "bfloat16")}
    claims.check(
        f"{name}: every peer took part, and all began with the same loss",
        bound="4 peers, equal losses",
        measured=", ".join([*sorted(expected - there), *result["disagreements"]]) or "all 4, equal",
        ok=expected <= there and not result["disagreements"],
    )
    claims.check(
        f"{name}: {pair['ours']} against the best peer, {pair['peer']}",
        bound=f"at least {ratio}x",
        measured=f"{pair['ratio']:.2f}x",
        ok=pair["ratio"] >= ratio,
    )
    claims.check(
        f"{name}: float32 against the best float32 peer, {alike['peer']}",
        bound=f"at least {in_float32}x",
        measured=f"{alike['ratio']:.2f}x",
        ok=alike["ratio"] >= in_float32,
    )
    if memory is not None:
        claims.check(
            f"{name}: peak memory of {pair['ours']} against that of the best peer, {pair['peer']}",
            bound=f"at most {memory}",
            measured=f"{pair['memory_ratio']:.2f}",
            ok=pair["memory_ratio"] <= memory,
        )
    steady: dict[str, float] = {}
    for row in result["contenders"]:  # ours is in every group
        steady[named(row)] = min(row["median_s"], steady.get(named(row), row["median_s"]))
    for label, times in result["first_steps"].items():
        for kind, bound in BOUND_OF_FIRST.items() if label.startswith("ours ") else ():
            begins, ends = times[kind] - steady[label], times[kind]
            for reached, seconds in (("begins", begins), ("ends", ends)):
                claims.check(
                    f"{name}: {label}, the first step {reached}, {kind}, after the start of the process",
                    bound=f"below {bound:g} s",
                    measured=f"{seconds:.1f} s; a step takes {steady[label]:.2f} s",
                    ok=seconds < bound,
                )
for name, ratio in GENERATES.items():
    result = measured(f"generation-{name}")
    for pair in result["ratios"]:
        if pair["ours"].split()[1] == pair["peer"].split()[1]:
            claims.check(
                f"{name}: {pair['ours']} generates against transformers",
                bound=f"at least {ratio}x",
                measured=f"{pair['ratio']:.2f}x",
                ok=pair["ratio"] >= ratio and not result["disagreements"],
            )
claims.finish()
