"""`tapeless gradcheck` on every preset: exit 0, every parameter tensor listed, in under a minute."""

import json
import math
import subprocess
import sys
import time

from claim import Claims

from tapeless.config import AnyModelConfig, SimpleLMConfig, load_preset, preset_names
from tapeless.model.build import build_model
from tapeless.model.transformer import transformer_specs

LIMIT = 60


def tensor_names(config: AnyModelConfig) -> list[str]:
    if isinstance(config, SimpleLMConfig):
        return list(build_model(config).params)
    return [spec.name for spec in transformer_specs(config)]


def closeness(finding: dict) -> float:  # to its bound
    if not finding["ok"]:
        return math.inf
    return finding["error"] / finding["bound"] if finding["bound"] else 0.0


claims = Claims("gradcheck_presets")
rows = []
for name in preset_names():
    tensors = tensor_names(load_preset(name))
    start = time.monotonic()
    command = [sys.executable, "-m", "tapeless", "gradcheck", "--preset", name, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = round(time.monotonic() - start, 1)
    print(done.stderr[-500:], end="")
    report = json.loads(done.stdout)
    listed = [row["tensor"] for row in report["tensors"]]
    exact = [f for f in report["findings"] if f["oracle"] in ("complex step", "autograd reference") and f["tensor"] in listed]
    worst = max(exact, key=closeness)
    claims.check(f"{name}: exit status", bound=0, measured=done.returncode, ok=done.returncode == 0)
    claims.check(f"{name}: every parameter tensor listed", bound=len(tensors), measured=len(listed), ok=listed == tensors)
    fewest = min(row["checks"] for row in report["tensors"])
    claims.check(f"{name}: oracles that judged each tensor, at least", bound=2, measured=fewest, ok=fewest >= 2)
    shown = f"{worst['error']:.1e}"
    claims.check(f"{name}: {worst['tensor']} by {worst['oracle']}", bound=worst["bound"], measured=shown, ok=worst["ok"])
    claims.check(f"{name}: seconds", bound=LIMIT, measured=seconds, ok=seconds < LIMIT)
    rows.append(
        {
            "preset": name,
            "parameters": report["parameters"],
            "tensors": len(listed),
            "checks": len(report["findings"]),
            "worst": max(f["error"] for f in exact),
            "full_size": max(
                f["error"] for f in report["findings"] if f["tensor"].startswith("along") and f["oracle"] == "complex step"
            ),
            "seconds": seconds,
            "before": report["sgd"]["before"],
            "after": report["sgd"]["after"],
        }
    )
claims.finish(table=rows)
