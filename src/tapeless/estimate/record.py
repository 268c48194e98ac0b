"""An estimate as plain data: what `tapeless estimate --json` prints, and report.py makes text of.

Tested by: tests/cli/test_estimate.py."""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tapeless.config import AnyModelConfig, TrainConfig
from tapeless.data.loader import training_batches
from tapeless.data.prepare import prepare
from tapeless.errors import TooLargeError
from tapeless.estimate.calibrate import calibrate, duration_of
from tapeless.estimate.computed_time import NotComputable, computed_time
from tapeless.estimate.disk import disk_of
from tapeless.estimate.fit import largest_batch, resource_errors
from tapeless.estimate.memory import Memory, memory_of, room_of
from tapeless.estimate.target import Target
from tapeless.model.build import num_params, step_flops
from tapeless.training.plan import total_steps
from tapeless.training.resources import free_disk
from tapeless.training.run_dir import RunDir
from tapeless.training.runs import import_base_model, text_format

Record = dict[str, Any]


def planned_steps(config: AnyModelConfig, train: TrainConfig) -> int:
    """Of the run. Epochs are counted in its own data, which is tokenized for it and thrown away."""
    if train.epochs is None:
        return total_steps(train, 0)
    assert train.seq_len is not None
    with tempfile.TemporaryDirectory(prefix="tapeless-") as folder:
        begun = import_base_model(train, RunDir(Path(folder)), ())
        data = prepare(begun, config.vocab_size, Path(folder), **text_format(begun))
        loader = training_batches(data, train.seq_len, train.batch_size * train.grad_accum, train.seed)
        return total_steps(train, loader.num_windows)


def estimate(
    name: str, config: AnyModelConfig, train: TrainConfig, out_dir: Path, target: Target | None = None
) -> tuple[Record, Memory]:
    """All but the time. train: with a seq_len and a dtype. target: the machine, if it is not this one. Everything in bytes,
    seconds and floating-point operations."""
    steps = planned_steps(config, train)
    assert train.seq_len is not None
    tokens = train.batch_size * train.grad_accum * train.seq_len
    memory = memory_of(config, train, target)
    disk = disk_of(memory.checkpoint, train, steps)
    room, flops = room_of(train, target), step_flops(config, tokens, train.seq_len)
    found = resource_errors(config, train, memory, disk, out_dir, target)
    result: Record = {
        "name": name,
        "model": asdict(config),
        "train": asdict(train),
        "parameters": num_params(config),
        "ops": memory.ops,
        "steps": steps,
        "tokens_a_step": tokens,
        "flops_a_step": flops,
        "flops": steps * flops,
        "memory": {
            "device": memory.device,
            "peak": memory.peak,
            "parts": memory.parts,
            "phases": memory.phases,
            "saving": memory.saving,
            "process": memory.process,
            "available": room,
            "largest_batch": largest_batch(config, train, room, target) if target else None,  # would take long on this one
        },
        "disk": {**disk._asdict(), "most": disk.most, "free": None if target else free_disk(out_dir), "out_dir": str(out_dir)},
        "resource_errors": [{"code": error.code, "message": str(error)} for error in found],
        "time": None,
    }
    return result, memory


def add_time(found: Record, memory: Memory, config: AnyModelConfig, train: TrainConfig, target: Target | None = None) -> None:
    """Measured here, or computed for another machine, for the run that was estimated; `time_error` is why that was not
    possible."""
    disk, steps = found["disk"], found["steps"]
    try:
        if target is not None:
            found["time"] = computed_time(config, train, target, memory.ops, steps)
            return
        times = calibrate(config, train, memory, found["memory"]["available"], Path(disk["out_dir"]))
    except (TooLargeError, NotComputable) as error:
        found["time_error"] = str(error)
    else:
        found["time"] = {**duration_of(times, train, steps, disk["checkpoint"]), "how": times.how}
