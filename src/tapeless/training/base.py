"""The base of a run that starts from another: the checkpoint it started from, recorded by its path and the hash of its weights.

    config.toml   [data] base_checkpoint, base_sha256          state.json   base (the hash), for adapters
A checkpoint of a run that trains adapters contains only those. Reading it finds the base here, or reports what is missing. Any
other run needs its base until its own first checkpoint, and must not start a second time from what the other run has learned
since.
Tested by: tests/train/test_adapter_runs.py, tests/train/test_init_from.py."""

from collections.abc import Mapping
from pathlib import Path

from tapeless.data.files import file_sha256
from tapeless.errors import CheckpointError, ConfigError
from tapeless.model.trained import merged
from tapeless.optim.ema import EMA
from tapeless.training.checkpoint import MODEL, Checkpoint, read_checkpoint
from tapeless.training.run_config import RunConfig

PATH, HASH = "base_checkpoint", "base_sha256"


def base_facts(checkpoint: Path) -> dict[str, str]:
    """What the configuration of a run records of its base."""
    return {PATH: str(checkpoint.resolve()), HASH: file_sha256(checkpoint / MODEL)}


def base_checkpoint(data: Mapping[str, str]) -> Checkpoint:
    """The checkpoint that a run's configuration names; any other is an error."""
    path = Path(data[PATH])
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
    base, optim = base_checkpoint(config.data).params, dict(checkpoint.optim)
    if EMA in optim:
        optim[EMA] = merged(base, optim[EMA], lora.scale)
    return checkpoint._replace(params=merged(base, checkpoint.params, lora.scale), optim=optim)
