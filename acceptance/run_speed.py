"""A training run is as fast as its steps, and the trainer's step as fast as that of the benchmark.

    python acceptance/run_speed.py                           on the CPU: runs of the command, and steps by turns
    python acceptance/run_speed.py --size 0.1 --rounds 1     a try: a tenth of the steps
    python acceptance/run_speed.py --device cuda             with torch, triton, numpy, transformers and safetensors alone
    … --parts documents                                      of steps, run, documents, large; each part takes minutes
Runs take turns, and so do the workers of the steps: each sleeps on its pipe until it is asked."""

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from claim import Claims, skip
from training import environment, of_kind, scratch, tapeless

from tapeless.training.run_dir import RunDir

PARTS = {"cpu": ("run", "steps"), "cuda": ("run", "documents", "large")}
# preset -> the steps of a run that are measured, from the end of one to the end of another, and the bound of their ratio
RUNS = {"llama-tiny": (500, 3000, 1.05), "llama-small": (100, 300, 1.02)}
DTYPES = ("float32", "bfloat16")
TURN = 1.0  # seconds
SAME = 0.03  # of the trainer's and the benchmark's step


def started(run: RunDir, *words: object) -> dict[str, Any]:
    """A run by the command; its times."""
    from tapeless.training.metrics_log import read_metrics
    from tapeless.training.run_time import RunTime

    done = tapeless("train", "new", "--out-dir", run.path, *words)
    if done.code:
        sys.exit(done.output)
    times = RunTime()
    for event in read_metrics(run.metrics):
        times.add(event)
    found = times.found()
    assert found
    return found


def ratio(run: RunDir, first: int, last: int) -> tuple[float, float]:
    """The wall clock per step divided by the median step, and the median step in seconds."""
    steps = {event["step"]: event for event in of_kind(run, "step")}
    step = median(steps[number]["step_seconds"] for number in range(first + 1, last + 1))
    return (steps[last]["time"] - steps[first]["time"]) / (last - first) / step, step


def runs_on_a_cpu(claims: Claims, rounds: int, size: float) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    tables: dict[str, Any] = {}
    for number in range(rounds):
        for preset, (first, last, _) in RUNS.items():
            for dtype in DTYPES:
                with scratch() as folder:
                    run, name = RunDir(folder / "run"), f"{preset} {dtype}"
                    # At least one period of the default evaluations.
                    a, b = max(100, round(size * first / 100) * 100), max(200, round(size * last / 100) * 100)
                    tables[name] = started(run, "--preset", preset, "--dtype", dtype, "--max-steps", b)
                    found.setdefault(name, []).append(ratio(run, a, b)[0])
                    print(f"      round {number + 1}: {name}, steps {a} to {b}: {found[name][-1]:.3f}", flush=True)
    for name, ratios in found.items():
        first, last, bound = RUNS[name.split()[0]]
        claims.check(
            f"{name}, defaults: wall clock per step of `train new` from step {first:,} to {last:,} / median step, "
            f"median of {rounds} runs",
            bound=f"at most {bound}",
            measured=f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            ok=median(ratios) <= bound,
        )
    return tables


class Worker:
    """The trainer's step, or the benchmark's on the same batches."""

    def __init__(self, who: str, preset: str, train: dict[str, Any], data: str):
        import torch

        from tapeless.bench.contenders import Ours
        from tapeless.bench.task import Task
        from tapeless.config import TrainConfig, load_preset
        from tapeless.data.prepare import open_prepared
        from tapeless.training.plan import default_seq_len
        from tapeless.training.runs import make_model
        from tapeless.training.trainer import Trainer

        model = load_preset(preset)
        config = TrainConfig(**{"seq_len": default_seq_len(model), "max_steps": 10**6, **train})
        self.trainer = Trainer(make_model(model, config), config, open_prepared(Path(data)))
        self.who, self.torch, self.cuda = who, torch, config.device != "cpu"
        self.ours = Ours(Task("ours", model, replace(config, lr=1e-4, min_lr=None))) if who == "bench" else None
        self.batch = 0

    def steps(self, count: int) -> dict[str, Any]:
        """Seconds of each step, and of all of them with what is around: for the trainer its batches, for the benchmark none."""
        trainer, seconds = self.trainer, []
        size = trainer.loader.batch_size
        batches = [
            tuple(x.to(trainer.model.device) for x in trainer.loader.batch(size * (self.batch + i))) for i in range(count)
        ]
        self.batch += count
        self.wait()
        began = time.perf_counter()
        for batch in batches:
            if self.ours is None:
                seconds.append(trainer.step(*trainer.next_batch()).step_seconds)
            else:
                self.ours.steps, self.ours.batch = self.ours.steps + 1, batch
                start = time.perf_counter()
                self.ours.step()
                seconds.append(time.perf_counter() - start)
        self.wait()
        return {"seconds": seconds, "wall": time.perf_counter() - began}

    def wait(self) -> None:
        if self.cuda:
            self.torch.cuda.synchronize()


def work(words: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    worker = Worker(**words)
    for line in sys.stdin:
        print(json.dumps(worker.steps(int(line))), file=answers, flush=True)


def asked(process: Any, count: int) -> dict[str, Any]:
    process.stdin.write(f"{count}\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        sys.exit(f"a worker ended, status {process.wait()}")
    return json.loads(line)


def by_turns(preset: str, train: dict[str, Any], data: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Of the trainer and the benchmark: the median step, and the median of the turns' seconds a step with what is around."""
    turns: dict[str, list[dict[str, Any]]] = {"trainer": [], "bench": []}
    with ExitStack() as stack:
        workers = {}
        for who in turns:
            words = json.dumps({"who": who, "preset": preset, "train": train, "data": str(data)})
            command = [sys.executable, __file__, "--worker", words]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            spin = {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": "10000"}  # as the command has it
            workers[who] = stack.enter_context(subprocess.Popen(command, env=spin | environment(None), **pipes))
        counts = {}
        for who, process in workers.items():
            asked(process, 5)  # compiles and captures
            counts[who] = max(3, round(TURN / median(asked(process, 5)["seconds"])))
        count = min(500, *counts.values())
        for number in range(rounds):
            for who in list(workers)[:: -1 if number % 2 else 1]:
                asked(workers[who], 1)  # the caches were the other's
                turns[who].append(asked(workers[who], count))
        for process in workers.values():
            process.stdin.close()
    return {
        who: {
            "step_s": median(second for turn in all_of for second in turn["seconds"]),
            "wall_s": median(turn["wall"] / count for turn in all_of),
        }
        for who, all_of in turns.items()
    }


def prepared(folder: Path, *words: object) -> Path:
    """The data of a run of one step of the command."""
    run = RunDir(folder / "prepared")
    started(run, "--max-steps", 3, "--sample-tokens", 1, "--eval-windows", 1, "--no-verify", *words)
    return run.path


def steps_on_a_cpu(claims: Claims, rounds: int) -> dict[str, Any]:
    found = {}
    for preset in RUNS:
        for dtype in DTYPES:
            with scratch() as folder:
                data = prepared(folder, "--preset", preset)
                found[f"{preset} {dtype}"] = pair = by_turns(preset, {"dtype": dtype}, data, rounds)
            share = pair["trainer"]["step_s"] / pair["bench"]["step_s"] - 1
            claims.check(
                f"{preset} {dtype}: the trainer's step vs. the benchmark's, by turns, median of {rounds} turns each",
                bound=f"within {SAME:.0%}",
                measured=f"{share:+.1%}: {1e3 * pair['trainer']['step_s']:.3f} and {1e3 * pair['bench']['step_s']:.3f} ms",
                ok=abs(share) <= SAME,
            )
    return found


GPU = ["--device", "cuda", "--dtype", "bfloat16"]
FULL = ["--preset", "llama-124m", "--batch-size", 32, "--seq-len", 1024, *GPU]
SETTINGS = {"batch_size": 32, "seq_len": 1024, "device": "cuda", "dtype": "bfloat16"}


def run_on_a_gpu(claims: Claims, rounds: int, size: float) -> dict[str, Any]:
    steps = max(100, round(1000 * size))
    with scratch() as folder:
        run = RunDir(folder / "run")
        found = started(run, *FULL, "--max-steps", steps)
        waits = waits_for_checkpoints(run)
        pair = by_turns("llama-124m", SETTINGS, run.path, rounds)
    share = found["tokens_per_s"] * pair["bench"]["step_s"] / (32 * 1024)
    claims.check(
        f"llama-124m, 32 x 1024, defaults, {steps:,} steps: tokens/s of the run, start-up excluded, of the benchmark's step",
        bound="at least 97 %",
        measured=f"{share:.1%}: {found['tokens_per_s']:,.0f} tokens/s",
        ok=share >= 0.97,
    )
    blocking(claims, "llama-124m", waits, 0.1)
    return {"run": found, "by_turns": pair}


def documents_on_a_gpu(claims: Claims, rounds: int, size: float) -> dict[str, Any]:
    del size
    with scratch() as folder:
        data = prepared(folder, *FULL, "--document-attention")
        pair = by_turns("llama-124m", {**SETTINGS, "document_attention": True}, data, rounds)
    share = pair["bench"]["wall_s"] / pair["trainer"]["wall_s"]
    claims.check(
        "llama-124m, 32 x 1024, packed documents: the trainer's steps with their batches vs. the benchmark's on the same",
        bound="at least 95 %",
        measured=f"{share:.1%}: {1e3 * pair['trainer']['wall_s']:.2f} and {1e3 * pair['bench']['wall_s']:.2f} ms",
        ok=share >= 0.95,
    )
    return {"by_turns": pair}


def large_on_a_gpu(claims: Claims, rounds: int, size: float) -> dict[str, Any]:
    """Far enough apart that a checkpoint is on disk before the next is due."""
    del rounds
    every = max(20, round(100 * size))
    words = [
        "--preset",
        "llama-1b",
        "--batch-size",
        8,
        "--seq-len",
        2048,
        *GPU,
        "--max-steps",
        2 * every,
        "--save-every",
        every,
        "--eval-every",
        every,
    ]
    with scratch() as folder:
        run = RunDir(folder / "run")
        found = started(run, *words, "--sample-every", 0, "--sample-tokens", 1)
        blocking(claims, "llama-1b", waits_for_checkpoints(run), 0.5)
    return {"run": found}


def waits_for_checkpoints(run: RunDir) -> tuple[int, float, float]:
    """How many were saved, the mean seconds that training waited for one, and those that the end waited for the last."""
    *_, last_evaluation, end = (event["seconds"].get("checkpoints", 0.0) for event in of_kind(run, "time_spent"))
    saves = len(of_kind(run, "checkpoint"))
    return saves, last_evaluation / saves, end - last_evaluation


def blocking(claims: Claims, preset: str, waits: tuple[int, float, float], bound: float) -> None:
    saves, seconds, at_the_end = waits
    claims.check(
        f"{preset}: seconds that training waits for a checkpoint, mean of {saves}; at the end, for the last",
        bound=f"at most {bound} s",
        measured=f"{seconds:.3f} s; {at_the_end:.2f} s",
        ok=seconds <= bound,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--parts", help="comma-separated; default: all of the device")
    parser.add_argument("--rounds", type=int, help="turns of each; default 3 runs and 12 turns of steps")
    parser.add_argument("--size", type=float, default=1.0, help="share of the steps, for a try")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(json.loads(args.worker))
        return
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            skip("needs a GPU")
    claims = Claims("run_speed" if args.device == "cpu" else "run_speed_cuda")
    tables: dict[str, Any] = {}
    for part in args.parts.split(",") if args.parts else PARTS[args.device]:
        if args.device == "cuda":
            on_a_gpu = {"run": run_on_a_gpu, "documents": documents_on_a_gpu, "large": large_on_a_gpu}
            tables[part] = on_a_gpu[part](claims, args.rounds or 12, args.size)
        elif part == "run":
            tables[part] = runs_on_a_cpu(claims, args.rounds or 3, args.size)
        else:
            tables[part] = steps_on_a_cpu(claims, args.rounds or 12)
    claims.finish(size=args.size, tables=tables)


if __name__ == "__main__":
    main()
