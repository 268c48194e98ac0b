"""Runs that were never trained: a directory, and events as a trainer emits them."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tapeless.config import ModelConfig, TrainConfig
from tapeless.data.files import write_json
from tapeless.report.history import RunHistory
from tapeless.training.metrics_log import MetricsLog
from tapeless.training.run_config import RunConfig, write_run_config
from tapeless.training.run_dir import RunDir

GROUPS = ["embed", *(f"blocks.{i}.{part}" for i in range(4) for part in ("attn", "ffn")), "final_norm", "head"]
NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(1)> & \x1b[31m \ufffd 'quoted' \"twice\""
BASELINES = {"uniform": 5.545, "unigram": 3.17, "bigram": 2.49}


def empty_run(path: Path, *, model: ModelConfig | None = None, **train: Any) -> RunDir:
    run = RunDir.create(path)
    data = {"tokenizer_hash": "a" * 64, "dataset_fingerprint": "b" * 64}
    config = RunConfig(model or ModelConfig(), TrainConfig(**train), data)
    write_run_config(run.config, config)
    write_json(run.env, {"argv": ["tapeless", "train", NASTY], "versions": {"torch": "2"}, "gpus": [], "git_commit": None})
    return run


def loss_at(step: int) -> float:
    return 1.5 + 4 / math.sqrt(step) + 0.1 * math.sin(step)


def step_event(step: int, **changes: Any) -> dict[str, Any]:
    usual = {"epoch": 0, "tokens": 512 * step, "loss": loss_at(step), "lr": 1e-3, "grad_norm": 0.6 + 2 / step}
    usual |= {"step_seconds": 0.05, "tokens_per_second": 10240.0, "time": 1.7e9 + step}
    return {"event": "step", "step": step, **(usual | changes)}


def layer_stats_event(step: int, **changes: Any) -> dict[str, Any]:
    norms = {group: 0.1 * (i + 1) for i, group in enumerate(GROUPS)}
    ratios = {group: 1e-3 / (i + 1) for i, group in enumerate(GROUPS)}
    memory = {"memory_bytes": 400_000_000 + step, "device_memory_bytes": None}
    return {
        "event": "layer_stats",
        "step": step,
        "grad_norm": norms,
        "update_ratio": ratios,
        **memory,
        "time": 1.7e9,
        **changes,
    }


def eval_event(step: int, loss: float) -> dict[str, Any]:
    numbers = {"val_loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss / math.log(2)}
    return {"event": "eval", "step": step, **numbers, "floor": None, "best": loss, "time": 1.7e9}


def course(steps: int, *, every: int = 100, floor: float | None = None) -> Iterator[dict[str, Any]]:
    """A whole run's events."""
    start = {"parameters": 832_512, "total_steps": steps, "baselines": BASELINES, "floor": floor, "changes": {}}
    yield {"event": "start", "step": 0, **start, "time": 1.7e9}
    for step in range(1, steps + 1):
        yield step_event(step)
        if step % 50 == 0 or step == 1:
            yield layer_stats_event(step)
        if step % every == 0:
            yield {"event": "checkpoint", "step": step, "path": f"step-{step:08d}", "time": 1.7e9}
            yield eval_event(step, loss_at(step) + 0.05)
            yield {"event": "sample", "step": step, "text": f"sample of step {step} {NASTY}", "time": 1.7e9}
    yield {"event": "end", "step": steps, "reason": "done", "time": 1.7e9}


def logged_run(path: Path, steps: int = 300, *, floor: float | None = None, **train: Any) -> RunDir:
    """A run whose metrics.jsonl is there."""
    run = empty_run(path, **train)
    with MetricsLog(run.metrics) as log:
        for event in course(steps, floor=floor):
            log.append(event)
    return run


def history_of(path: Path, steps: int, **train: Any) -> RunHistory:
    history = RunHistory(empty_run(path, **train))
    for event in course(steps):
        history.add(event)
    return history
