"""ModelConfig.blocks: which sublayers a block has, layer by layer.

    attn+ffn                                every layer: attention, then feed-forward
    attn+ffn/shift+ffn                      layers alternate; the pattern repeats
    attn(num_kv_heads=1)+ffn/attn+ffn       a layer with settings of its own
Tested by: tests/test_config.py."""

import re
from typing import Any

from tapeless.errors import ConfigError

DEFAULT_BLOCKS = "attn+ffn"
_SUBLAYER = re.compile(r"([A-Za-z_]\w*)(?:\(([^()]*)\))?")
_PLUS = re.compile(r"\+(?![^(]*\))")  # not the one inside the parentheses of attn(rope_theta=1e+6)
_SETTING = re.compile(r"\s*(\w+)\s*=\s*([\w.+-]+)\s*")

Pattern = list[list[tuple[str, dict[str, Any]]]]  # of each layer its sublayers, (kind, settings)


def parse_blocks(text: str) -> Pattern:
    """The layers of one period."""
    return [[_sublayer(part.strip(), text) for part in _PLUS.split(layer)] for layer in text.split("/")]


def _sublayer(part: str, text: str) -> tuple[str, dict[str, Any]]:
    found = _SUBLAYER.fullmatch(part)
    settings = [_SETTING.fullmatch(setting) for setting in (found[2].split(",") if found and found[2] else ())]
    if found is None or None in settings:
        raise ConfigError(f"blocks: cannot read {part!r} in {text!r}; expected a pattern such as attn+ffn")
    values = {setting[1]: _value(setting[2]) for setting in settings if setting}
    if len(values) < len(settings):
        raise ConfigError(f"blocks: {part!r} in {text!r} has a setting twice; leave one out")
    return found[1], values


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text
