"""Small checkpoints to save, damage and compare."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tapeless.data.files import file_sha256, write_json
from tapeless.training.checkpoint import MANIFEST, MODEL, OPTIM, STATE, Checkpoint, save_checkpoint


def state_at(step: int, **changes: object) -> dict[str, object]:
    state = {"tokens": step * 64, "epoch": 1, "sample_index": step * 2, "seed": 7, "best_val_loss": 0.1 + 0.2, "best_step": 3}
    state |= {"step": step, "guard": {"losses": [1.5, 2.5e-17]}, "world_size": 1, "base": None, "functions": None}
    state |= {"seal": None}
    return state | changes


# state.json as the first version of this format wrote it
EARLIEST_STATE: dict[str, Any] = {
    "format_version": 1,
    "threads": 2,
    "torch_version": "2.13.0+cpu",
    "step": 4,
    "tokens": 128,
    "epoch": 0,
    "sample_index": 8,
    "seed": 0,
    "best_val_loss": 5.455760478973389,
    "best_step": 2,
    "guard": {"evals_without_best": 0, "last_eval": 2},
    "world_size": 1,
}


def rewrite_state(path: Path, state: dict[str, object]) -> None:
    """Another state in a checkpoint, and a manifest that fits to it."""
    write_json(path / STATE, state)
    names = (MODEL, OPTIM, STATE)
    listed = [{"name": name, "size": (path / name).stat().st_size, "sha256": file_sha256(path / name)} for name in names]
    write_json(path / MANIFEST, {"files": listed})


def tensors_at(step: int) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """A few parameters and two moments, different at every step; views of one buffer, as a model's are."""
    flat = torch.randn(3, 64, generator=torch.Generator().manual_seed(step))
    views = [{"embed.w": row[:12].view(3, 4), "blocks.0.attn.wq": row[16:41].view(5, 5)} for row in flat]
    return views[0], {"exp_avg": views[1], "exp_avg_sq": views[2]}


def save_at(folder: Path, step: int) -> Path:
    return save_checkpoint(folder, *tensors_at(step), state_at(step))


def assert_is(checkpoint: Checkpoint, step: int) -> None:
    params, optim = tensors_at(step)
    assert checkpoint.state.items() >= state_at(step).items()
    for got, expected in [(checkpoint.params, params), *((checkpoint.optim[key], optim[key]) for key in optim)]:
        assert got.keys() == expected.keys()
        assert all(got[name].equal(expected[name]) for name in expected)


def silent(message: str) -> None:
    pytest.fail(f"a warning where nothing is wrong: {message}")


def flip(position: int) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[position] ^= 1
        file.write_bytes(content)

    return damage
