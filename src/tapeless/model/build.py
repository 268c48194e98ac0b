"""The model that a configuration describes."""

from typing import Any

from tapeless.config import AnyModelConfig, SimpleLMConfig
from tapeless.model.simple_lm import SimpleLM
from tapeless.model.transformer import Transformer

AnyModel = Transformer | SimpleLM


def build_model(config: AnyModelConfig, **options: Any) -> AnyModel:
    """options: seed, device, dtype, initialized, and for a transformer also ops and recompute."""
    return SimpleLM(config, **options) if isinstance(config, SimpleLMConfig) else Transformer(config, **options)
