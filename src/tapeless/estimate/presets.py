"""The presets as a list: parameters, shape, memory to train each as it is, and where that fits.

Tested by: tests/cli/test_presets.py."""

from dataclasses import replace
from typing import Any

from tapeless.config import KINDS, AnyModelConfig, TrainConfig, preset_names, preset_recipe
from tapeless.config.hardware import GPUS
from tapeless.estimate.fit import gib
from tapeless.estimate.memory import memory_of
from tapeless.estimate.target import Target
from tapeless.model.build import num_params
from tapeless.text import table
from tapeless.training.plan import resolve_seq_len
from tapeless.training.resources import available_bytes

CARDS = ("rtx4090", "h100", "h200")
CPU = "this CPU"
Preset = dict[str, Any]


def described() -> dict[str, Any]:
    """In bytes: what is free on this CPU and on some GPUs, and a row for each preset."""
    free = {CPU: available_bytes("cpu")} | {card: GPUS[card].free for card in CARDS}
    return {"free": free, "presets": [_described(name, free) for name in preset_names()]}


def _described(name: str, free: dict[str, int]) -> Preset:
    kind, model, values = preset_recipe(name)
    config: AnyModelConfig = KINDS[kind](**model)
    train = TrainConfig(**{**values, "verify": False})
    train = replace(train, seq_len=resolve_seq_len(config, train))
    cpu = memory_of(config, train).peak
    gpu = memory_of(config, replace(train, device="cuda", dtype="bfloat16"), Target("a GPU", max(free.values()))).peak
    return {
        "preset": name,
        "parameters": num_params(config),
        "layers": getattr(config, "num_layers", 1),
        "width": config.hidden_dim,
        "batch_size": train.batch_size,
        "seq_len": train.seq_len,
        "cpu": cpu,
        "gpu": gpu,
        "fits": [place for place, room in free.items() if (cpu if place == CPU else gpu) <= room],
    }


def text(found: dict[str, Any]) -> str:
    rows = [("preset", "parameters", "layers x width", "batch", "CPU, float32", "GPU, bfloat16", "fits")]
    for row in found["presets"]:
        shape, batch = f"{row['layers']} x {row['width']}", f"{row['batch_size']} x {row['seq_len']}"
        needs = gib(row["cpu"]), gib(row["gpu"])
        rows.append((row["preset"], f"{row['parameters']:,}", shape, batch, *needs, ", ".join(row["fits"]) or "none of these"))
    free = ", ".join(f"{place} {gib(size)}" for place, size in found["free"].items())
    return f"{table(rows)}\n\nFree: {free}. Other batches and GPUs: tapeless estimate"
