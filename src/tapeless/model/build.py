"""The model that a configuration describes, and what can be counted without building it."""

from typing import Any

import torch

from tapeless.config import AnyModelConfig, ModelConfig, SimpleLMConfig
from tapeless.model.block import build_blocks
from tapeless.model.params import ParamSpec, count_params
from tapeless.model.simple_lm import SimpleLM, simple_lm_specs
from tapeless.model.transformer import Transformer, transformer_specs

AnyModel = Transformer | SimpleLM


def build_model(config: AnyModelConfig, **options: Any) -> AnyModel:
    """options: seed, device, dtype, initialized, and for a transformer also ops and recompute."""
    return SimpleLM(config, **options) if isinstance(config, SimpleLMConfig) else Transformer(config, **options)


def param_specs(config: AnyModelConfig) -> list[ParamSpec]:
    return simple_lm_specs(config) if isinstance(config, SimpleLMConfig) else transformer_specs(config)


def num_params(config: AnyModelConfig) -> int:
    return count_params(param_specs(config))


def step_flops(config: AnyModelConfig, tokens: int, seq_len: int) -> int:
    """FLOPs of a training step: for each token 2 per linear weight and those of attention forward, twice that backward."""
    forward = 2 * sum(torch.Size(spec.shape).numel() for spec in param_specs(config) if spec.is_linear)
    if isinstance(config, ModelConfig):
        forward += sum(s.extra_flops(seq_len) for block in build_blocks(config) for s in block.sublayers)
    return 3 * tokens * forward
