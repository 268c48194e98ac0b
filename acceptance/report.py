"""A run's report: drawn by a browser without a complaint, small however long the run, at a cost that no run notices."""

import math
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from browser import BROWSER, DARK, curves, opened
from claim import Claims
from training import load_average, of_kind, scratch, tapeless, train

from tapeless.config import ModelConfig, TrainConfig, load_preset
from tapeless.data.files import file_sha256
from tapeless.data.prepare import prepare
from tapeless.model.transformer import Transformer
from tapeless.report.reporters.html import SHARE, HtmlReporter
from tapeless.training.layer_stats import LayerStats
from tapeless.training.metrics_log import MetricsLog
from tapeless.training.run_dir import RunDir
from tapeless.training.trainer import Trainer

SMALL = ["--hidden-dim", 64, "--num-layers", 4, "--num-heads", 4, "--intermediate-dim", 172, "--max-seq-len", 64]
SMALL += ["--batch-size", 6, "--max-steps", 1200, "--eval-every", 60, "--sample-every", 300, "--layer-stats-every", 30]
RUNS = {"cosine": ["--lr", 4e-3], "wsd": ["--lr", 1e-3, "--lr-schedule", "wsd"]}
SINGLE = ("grad_norm", "clip_rate", "lr", "tokens_per_second", "memory")  # charts of one curve a run
LONG, BYTES, SECONDS = 100_000, 1_000_000, 10
COST, ACCURACY = 0.01, 0.02


def check_browser(claims: Claims, pages: dict[str, Path], counts: dict[str, int]) -> None:
    for name, page in pages.items():
        for theme, flags in (("light", []), ("dark", [DARK])):
            dom, complaints = opened(page, *flags)
            found = {"loss": len(curves(dom, "loss"))} | {chart: len(curves(dom, chart)) for chart in SINGLE}
            expected = {"loss": 2 * counts[name]} | dict.fromkeys(SINGLE, counts[name])
            claims.check(
                f"the {name} in headless Chromium, {theme}: curves in every chart, nothing in the console",
                bound=f"{sum(expected.values())} curves, 0 complaints",
                measured=f"{sum(found.values())} curves, {len(complaints)} complaints",
                ok=found == expected and not complaints,
            )


def long_run(folder: Path, like: RunDir) -> RunDir:
    """A real run's events, told over and over until there are LONG steps."""
    run = RunDir(folder)
    run.path.mkdir()
    for name in ("config.toml", "env.json"):
        (run.path / name).write_bytes((like.path / name).read_bytes())
    events = [event for kind in ("step", "layer_stats", "eval", "sample") for event in of_kind(like, kind)]
    events.sort(key=lambda event: event["step"])
    last = events[-1]["step"]
    with MetricsLog(run.metrics) as log:
        log.append(of_kind(like, "start")[0])
        for round_ in range(-(-LONG // last)):
            for event in events:
                if (step := event["step"] + round_ * last) <= LONG:
                    log.append(event | {"step": step} | ({"tokens": step * 384} if event["event"] == "step" else {}))
    return run


def check_size(claims: Claims, folder: Path, like: RunDir) -> None:
    run = long_run(folder / "long", like)
    before = cpu_seconds()
    done = tapeless("report", run.path)
    seconds, size = cpu_seconds() - before, run.report.stat().st_size
    claims.check(f"the report of {LONG:,} steps", bound=f"under {BYTES:,} bytes", measured=f"{size:,} bytes", ok=size < BYTES)
    claims.check(
        "the CPU time to write it, start of Python and reading of metrics.jsonl included",
        bound=f"under {SECONDS} s",
        measured=f"{seconds:.1f} s",
        ok=done.code == 0 and seconds < SECONDS,
    )


def cpu_seconds() -> float:
    """Of the processes that were waited for: whatever else the machine does."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def median_seconds(call: Callable[[], object]) -> float:
    """Of 30 calls, the time of the processor: in one thread it does not depend on what else the machine does."""
    times = []
    for _ in range(30):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return statistics.median(times)


def check_cost(claims: Claims, folder: Path) -> dict[str, float]:
    """Each part by itself, since together they are too small beside the noise of a step."""
    torch.set_num_threads(1)
    config = TrainConfig(seq_len=128, batch_size=8, max_steps=100)
    data = prepare(config, 256, folder / "data")
    trainer = Trainer(Transformer(load_preset("tiny")), config, data)
    batch = trainer.next_batch()
    for _ in range(5):
        trainer.step(*batch)
    look = LayerStats(trainer.model, 1)
    step = median_seconds(lambda: trainer.step(*batch))
    watch = median_seconds(lambda: (look.before(), look.after(1.0)))
    page = HtmlReporter(RunDir(folder / "cosine"))
    event = of_kind(RunDir(folder / "cosine"), "step")[-1]
    told = median_seconds(lambda: [page.history.add(event) for _ in range(100)]) / 100
    share = (watch / config.layer_stats_every + told) / step + SHARE
    claims.check(
        f"layer statistics of tiny (8 x 128 in one thread, a step of {1e3 * step:.1f} ms), {1e3 * watch:.2f} ms every "
        f"{config.layer_stats_every} steps, {1e6 * told:.0f} µs a step for the page's numbers, and at most {100 * SHARE:g} % "
        "of the time for writing it",
        bound=f"under {100 * COST:g} % of the time",
        measured=f"{100 * share:.2f} %",
        ok=share < COST,
    )
    return {"step_seconds": step, "watch_seconds": watch, "event_seconds": told}


def check_accuracy(claims: Claims, folder: Path) -> None:
    """Of matrices beyond SAMPLED elements some stand for all: how far off is that, with an embedding of rare tokens?"""
    shape = ModelConfig(vocab_size=2048, hidden_dim=256, num_layers=1, num_heads=4, intermediate_dim=688, max_seq_len=64)
    config = TrainConfig(seq_len=64, batch_size=4, max_steps=20)
    trainer = Trainer(Transformer(shape), config, prepare(config, shape.vocab_size, folder / "wide"))
    look, worst = LayerStats(trainer.model, 1), 0.0
    for _ in range(5):
        before = {name: w.clone() for name, w in trainer.model.params.items()}
        look.before()
        found = look.after(trainer.step(*trainer.next_batch()).grad_norm)["update_ratio"]
        for group, names in look._names.items():
            moved = math.hypot(*(float((trainer.model.params[name] - before[name]).norm()) for name in names))
            worst = max(worst, abs(found[group] / (moved / math.hypot(*(float(before[name].norm()) for name in names))) - 1))
    claims.check(
        "update-to-weight ratios of large matrices from some of their elements, against all of them",
        bound=f"within {100 * ACCURACY:g} %",
        measured=f"{100 * worst:.2f} % at most",
        ok=worst < ACCURACY,
    )


def check_bits(claims: Claims, folder: Path) -> None:
    hashes = []
    for every, report in ((0, "none"), (1, "html,csv")):
        run = RunDir(folder / f"bits-{every}")
        train(
            run, *SMALL, "--max-steps", 60, "--eval-every", 20, "--layer-stats-every", every, "--report-to", report, threads=1
        )
        hashes.append(file_sha256(run.checkpoints / "step-00000060" / "model.safetensors"))
    claims.check(
        "weights after 60 steps, with layer statistics and report at every step, and without",
        bound="equal bytes",
        measured="equal" if hashes[0] == hashes[1] else "different",
        ok=hashes[0] == hashes[1],
    )


def main() -> None:
    if BROWSER is None:
        sys.exit("needs Chromium or Chrome in the path")
    claims = Claims("report")
    with scratch() as folder:
        runs = {name: RunDir(folder / name) for name in RUNS}
        for name, flags in RUNS.items():
            train(runs[name], *SMALL, *flags, threads=1)
        pages = {"report": runs["cosine"].report, "comparison": folder / "comparison.html"}
        if tapeless("report", *(run.path for run in runs.values()), "--out", pages["comparison"]).code:
            sys.exit("tapeless report failed")
        check_browser(claims, pages, {"report": 1, "comparison": 2})
        check_size(claims, folder, runs["cosine"])
        cost = check_cost(claims, folder)
        check_accuracy(claims, folder)
        check_bits(claims, folder)
        claims.finish(**cost, load_average=load_average())


if __name__ == "__main__":
    main()
