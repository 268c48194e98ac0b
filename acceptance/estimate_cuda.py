"""On a GPU: what torch reserves for steps and for an evaluation after them, against the dry run, to 3 %.

Each configuration has a process of its own: the trainer's captured step three times, which captures it, then two evaluations of
as many rows as the trainer evaluates at a time. The largest is near what an H200 holds. Needs torch, Triton and numpy."""

import json
import subprocess
import sys
from typing import Any

import torch
from claim import Claims, skip

from tapeless.bench.contenders import Ours, load_libraries
from tapeless.bench.task import Task, measured
from tapeless.config import TrainConfig, load_preset
from tapeless.config.hardware import CONTEXT
from tapeless.estimate.memory import MIB, memory_of
from tapeless.estimate.target import Target

BOUND, STEPS = 0.03, 3
RUNS: list[dict[str, Any]] = [
    {"preset": "llama-124m", "batch_size": 32, "seq_len": 1024},
    {"preset": "llama-124m", "batch_size": 32, "seq_len": 1024, "dtype": "fp8"},
    {"preset": "llama-350m", "batch_size": 16, "seq_len": 1024, "recompute": "full"},
    {"preset": "llama-1b", "batch_size": 8, "seq_len": 2048},
    {"preset": "llama-124m", "batch_size": 512, "seq_len": 1024},
]


def task_of(preset: str, **options: Any) -> Task:
    train = TrainConfig(**{"dtype": "bfloat16", "device": "cuda", "verify": False, **options})
    return Task("ours", load_preset(preset), measured(train, options["seq_len"]))


def measure(task: Task) -> dict[str, int]:
    """Bytes. Where an evaluation finds no memory it is left out."""
    load_libraries(task)
    free, total = torch.cuda.mem_get_info()
    run = Ours(task)
    for step in range(STEPS):
        run.prepare(step)
        run.step()
    torch.cuda.synchronize()
    found = {"context": total - free, "total": total, "training step": torch.cuda.max_memory_reserved()}
    rows = min(task.train.batch_size, task.train.eval_windows)
    tokens, targets = (x[:rows] for x in run.batch)
    try:
        for _ in range(2):
            run.model.loss(tokens, targets, num_targets=1, check=False)  # type: ignore[call-arg]
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return found
    return {**found, "evaluation": torch.cuda.max_memory_reserved()}


def main() -> None:
    if not torch.cuda.is_available():
        skip("needs a GPU")
    claims, rows = Claims("estimate_cuda"), []
    for options in RUNS:
        task, words = task_of(**options), " ".join(str(value) for value in options.values())
        process = subprocess.run(
            [sys.executable, __file__, json.dumps(options)], stdout=subprocess.PIPE, text=True, check=False
        )
        if process.returncode:
            claims.check(f"{words}: runs", bound="status 0", measured=process.returncode, ok=False)
            continue
        found = json.loads(process.stdout.splitlines()[-1])
        predicted = memory_of(task.model, task.train, Target("this GPU", found["total"] - CONTEXT)).phases
        for phase, size in predicted.items():
            if phase in found:
                off = size / found[phase] - 1
                what = f"{words}: {phase}, {found[phase] / MIB:,.0f} MiB reserved, predicted {size / MIB:,.0f}"
                claims.check(what, bound=f"within {BOUND:.0%}", measured=f"{off:+.2%}", ok=abs(off) <= BOUND)
        rows.append({**options, "measured": found, "predicted": predicted})
    taken = max(row["measured"]["context"] for row in rows)
    what = f"of {rows[0]['measured']['total'] / MIB:,.0f} MiB, {taken / MIB:,.0f} are taken before the first tensor"
    claims.check(what, bound=f"at most {CONTEXT / MIB:,.0f}", measured=f"{taken / MIB:,.0f}", ok=taken <= CONTEXT)
    claims.finish(gpu=torch.cuda.get_device_name(), runs=rows)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(task_of(**json.loads(sys.argv[1])))))
    else:
        main()
