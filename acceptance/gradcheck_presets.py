"""`tapeless gradcheck` on every preset: exit 0, every parameter tensor listed, in under a minute."""

import json
import subprocess
import sys
import time

from claim import Claims

from tapeless.model.build import build_model
from tapeless.config import SimpleLMConfig, load_preset, preset_names
from tapeless.model.params import transformer_specs

LIMIT = 60

claims = Claims("gradcheck_presets")
rows = []
for name in preset_names():
    config = load_preset(name)
    tensors = list(build_model(config).params) if isinstance(config, SimpleLMConfig) else [spec.name for spec in transformer_specs(config)]
    start = time.monotonic()
    command = [sys.executable, "-m", "tapeless", "gradcheck", "--preset", name, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - start
    print(done.stderr[-500:], end="")
    report = json.loads(done.stdout)
    listed = [row["tensor"] for row in report["tensors"]]
    worst = max(report["findings"], key=lambda finding: finding["error"] / finding["bound"] if finding["bound"] else finding["error"])
    claims.check(f"{name}: exit status", bound=0, measured=done.returncode, ok=done.returncode == 0)
    claims.check(f"{name}: every parameter tensor listed", bound=len(tensors), measured=len(listed), ok=listed == tensors)
    claims.check(f"{name}: seconds", bound=LIMIT, measured=round(seconds, 1), ok=seconds < LIMIT)
    rows.append({"preset": name, "parameters": report["parameters"], "tensors": len(listed), "checks": len(report["findings"]), "worst": worst, "seconds": round(seconds, 1), "loss_before": report["sgd"]["before"], "loss_after": report["sgd"]["after"]})
claims.finish(table=rows)
