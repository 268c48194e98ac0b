"""What a run can be exported to, said at its start.

Tested by: tests/interop/test_targets.py."""

from tapeless.config import AnyModelConfig, ModelConfig
from tapeless.data.tokenizer import Tokenizer
from tapeless.errors import ConfigError
from tapeless.interop.families import family_of
from tapeless.interop.gguf_export import require_gguf


def export_targets(config: AnyModelConfig, tokenizer: Tokenizer) -> str:
    try:
        family = family_of(config)
    except ConfigError as error:
        return f"neither to hf nor to gguf: {error}"
    assert isinstance(config, ModelConfig)  # others are in no family
    try:
        require_gguf(family, config, tokenizer)
    except ConfigError as error:
        return f"hf ({family.name}), not gguf: {error}"
    return f"hf ({family.name}), gguf"
