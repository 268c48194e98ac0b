"""The base of a run that starts from another: the checkpoint it started from, recorded by its path and the hash of its weights.

    config.toml   [data] base_checkpoint, base_sha256          state.json   base (the hash), for adapters
A checkpoint of a run that trains adapters contains only those, so the run keeps its base: the directory RUN/base, a run of one
checkpoint, whose path is recorded relative to the run, so that the run can be moved and archived. Any other run needs its base
until its own first checkpoint, and must not start a second time from what the other run has learned since.
Tested by: tests/train/test_adapter_runs.py, tests/train/test_init_from.py."""

from collections.abc import Mapping
from pathlib import Path

from tapeless.data.chat import FILE as CHAT_TEMPLATE
from tapeless.data.files import file_sha256, link
from tapeless.errors import CheckpointError, ConfigError
from tapeless.interop.generation import FILE as GENERATION
from tapeless.model.trained import merged
from tapeless.optim.ema import EMA
from tapeless.training.checkpoint import MODEL, Checkpoint, point_to, read_checkpoint
from tapeless.training.run_config import RunConfig

PATH, HASH = "base_checkpoint", "base_sha256"
KEPT = {"config.toml", "env.json", "tokenizer.json", GENERATION, CHAT_TEMPLATE}  # of the base, next to its checkpoint


def base_facts(checkpoint: Path, run: Path) -> dict[str, str]:
    """What the configuration of a run records of its base."""
    path, run = checkpoint.resolve(), run.resolve()
    inside = path.is_relative_to(run)
    return {PATH: path.relative_to(run).as_posix() if inside else str(path), HASH: file_sha256(checkpoint / MODEL)}


def keep_base(checkpoint: Path, run: Path) -> Path:
    """The checkpoint that adapters belong to, as a part of their run: linked, or copied where the disk has no links."""
    source = checkpoint.parents[1]
    target = run / "base" / checkpoint.relative_to(source)
    target.mkdir(parents=True)
    files = [*(file for file in source.iterdir() if file.name in KEPT), *checkpoint.iterdir()]
    for file in files:
        link(file, run / "base" / file.relative_to(source))
    point_to(target.parent, "latest", target)
    return target


def base_checkpoint(data: Mapping[str, str], run: Path) -> Checkpoint:
    """The checkpoint that a run's configuration names; any other is an error."""
    path = run / data[PATH]  # of older runs absolute, also if it is in the run
    inside = run / Path(*path.parts[-3:])
    if not path.is_dir() and inside.parent.parent.name == "base" and inside.is_dir():
        path = inside
    if not path.is_dir():
        raise CheckpointError(f"the run started from {path}, which is missing; restore it, or set its new path in [data]")
    found = file_sha256(path / MODEL)
    if found != data[HASH]:
        raise CheckpointError(f"{path} is not the model that the run started from: {found[:12]}, expected {data[HASH][:12]}")
    return read_checkpoint(path)


def merge_base(checkpoint: Checkpoint, config: RunConfig) -> Checkpoint:
    """A checkpoint with the whole model in it: adapters are merged into their base."""
    lora = config.train.lora
    if lora is None:
        return checkpoint
    if HASH not in config.data:
        raise ConfigError(f"{checkpoint.path}: [data] of config.toml does not name the base of the adapters ({PATH}, {HASH})")
    if checkpoint.state["base"] != config.data[HASH]:
        raise CheckpointError(f"{checkpoint.path} holds adapters for another base than config.toml names: {HASH} differs")
    base, optim = base_checkpoint(config.data, checkpoint.path.parents[1]).params, dict(checkpoint.optim)
    if EMA in optim:
        optim[EMA] = merged(base, optim[EMA], lora.scale)
    return checkpoint._replace(params=merged(base, checkpoint.params, lora.scale), optim=optim)
