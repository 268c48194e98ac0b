"""tapeless: pretrain transformer language models without an autograd tape.

Nothing heavy is imported here; each name loads what it needs when it is first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "ModelConfig": "tapeless.config",
    "SimpleLMConfig": "tapeless.config",
    "TrainConfig": "tapeless.config",
    "Sampling": "tapeless.config",
    "load_preset": "tapeless.config",
    "TapelessError": "tapeless.errors",
    "Transformer": "tapeless.model.transformer",
    "SimpleLM": "tapeless.model.simple_lm",
    "Chain": "tapeless.model.chain",
    "layer": "tapeless.model.chain",
    "residual": "tapeless.model.chain",
    "Op": "tapeless.ops.op",
    "OpSet": "tapeless.ops.op",
    "REFERENCE": "tapeless.ops.reference",
    "register_ops": "tapeless.kernels.choose",
    "saved_bytes": "tapeless.model.memory",
    "prepare": "tapeless.data.prepare",
    "Trainer": "tapeless.training.trainer",
    "load": "tapeless.training.loading",
    "train": "tapeless.runner",
    "resume": "tapeless.runner",
    "STOP": "tapeless.runner",
    "TrainResult": "tapeless.runner",
    "optim": "tapeless.optim",
}
__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from tapeless import optim as optim
    from tapeless.config import ModelConfig as ModelConfig
    from tapeless.config import Sampling as Sampling
    from tapeless.config import SimpleLMConfig as SimpleLMConfig
    from tapeless.config import TrainConfig as TrainConfig
    from tapeless.config import load_preset as load_preset
    from tapeless.data.prepare import prepare as prepare
    from tapeless.errors import TapelessError as TapelessError
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tapeless' has no attribute {name!r}")
    home = import_module(_HOMES[name])
    return home if home.__name__ == f"tapeless.{name}" else getattr(home, name)


def __dir__() -> list[str]:
    return __all__
