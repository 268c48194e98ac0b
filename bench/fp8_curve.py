"""fp8 vs. bfloat16: the same model on the same batches for a thousand steps, on this Python's own sources.

python bench/fp8_curve.py       on a machine with a GPU that multiplies in fp8: two minutes

Writes results/fp8-curve.json: the mean training loss of every hundred steps, and the validation loss."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from suite import CURVE, RESULTS

RUN = (
    "--preset llama-124m --vocab-size 256 --tokenizer bytes --seq-len 1024 --batch-size 16 --device cuda --seed 1 "
    "--max-steps 1000 --eval-every 250 --eval-windows 32 --sample-every 0 --save-every 5000 --keep-last 1"
)
EVERY = 100  # steps of a mean


def losses(metrics: Path) -> dict[str, Any]:
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    train = [event["loss"] for event in events if event["event"] == "step"]
    return {
        "train": [mean(train[i : i + EVERY]) for i in range(0, len(train), EVERY)],
        "validation": {str(event["step"]): event["val_loss"] for event in events if event["event"] == "eval"},
    }


def trained(dtype: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / dtype
        command = [sys.executable, "-m", "tapeless", "train", "new", *RUN.split(), "--dtype", dtype, "--out-dir", str(run)]
        subprocess.run(command, check=True)
        return losses(run / "metrics.jsonl")


if __name__ == "__main__":
    found = {dtype: trained(dtype) for dtype in ("bfloat16", "fp8")}
    (RESULTS / f"{CURVE}.json").write_text(json.dumps({"kind": "curve", "run": RUN, "every": EVERY, **found}, indent=1) + "\n")
