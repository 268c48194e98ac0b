"""tapeless: pretrain transformer language models without an autograd tape.

Nothing heavy is imported here; each name loads what it needs when it is first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_NAMES = {
    "config": ("ModelConfig", "SimpleLMConfig", "TrainConfig", "Sampling", "load_preset"),
    "data.prepare": ("prepare",),
    "errors": ("TapelessError",),
    "generate.engine": ("Engine",),
    "kernels.choose": ("register_ops",),
    "model.chain": ("Chain", "layer", "residual"),
    "model.memory": ("saved_bytes",),
    "model.simple_lm": ("SimpleLM",),
    "model.transformer": ("Transformer",),
    "ops.op": ("Op", "OpSet"),
    "ops.reference": ("REFERENCE",),
    "runner": ("train", "resume", "STOP", "TrainResult"),
    "training.loading": ("load",),
    "training.trainer": ("Trainer",),
}
_HOMES = {name: f"tapeless.{module}" for module, names in _NAMES.items() for name in names}
__all__ = ["__version__", "optim", *_HOMES]

if TYPE_CHECKING:
    from tapeless import optim as optim
    from tapeless.config import (
        ModelConfig as ModelConfig,
    )
    from tapeless.config import (
        Sampling as Sampling,
    )
    from tapeless.config import (
        SimpleLMConfig as SimpleLMConfig,
    )
    from tapeless.config import (
        TrainConfig as TrainConfig,
    )
    from tapeless.config import (
        load_preset as load_preset,
    )
    from tapeless.data.prepare import prepare as prepare
    from tapeless.errors import TapelessError as TapelessError
    from tapeless.generate.engine import Engine as Engine
    from tapeless.kernels.choose import register_ops as register_ops
    from tapeless.model.chain import Chain as Chain
    from tapeless.model.chain import layer as layer
    from tapeless.model.chain import residual as residual
    from tapeless.model.memory import saved_bytes as saved_bytes
    from tapeless.model.simple_lm import SimpleLM as SimpleLM
    from tapeless.model.transformer import Transformer as Transformer
    from tapeless.ops.op import Op as Op
    from tapeless.ops.op import OpSet as OpSet
    from tapeless.ops.reference import REFERENCE as REFERENCE
    from tapeless.runner import STOP as STOP
    from tapeless.runner import TrainResult as TrainResult
    from tapeless.runner import resume as resume
    from tapeless.runner import train as train
    from tapeless.training.loading import load as load
    from tapeless.training.trainer import Trainer as Trainer


if not TYPE_CHECKING:  # which would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name == "optim":
            return import_module("tapeless.optim")
        if name not in _HOMES:
            raise AttributeError(f"module 'tapeless' has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
