"""The presets that descend from the forebears have exactly the parameters they should have."""

from claim import Claims

from tapeless.config import SimpleLMConfig, load_preset, preset_names
from tapeless.model.build import build_model
from tapeless.model.params import count_params
from tapeless.model.transformer import transformer_specs

EXPECTED = {"tiny": 132_224, "small": 21_133_824, "cllm": 19_215_872, "simplelm": 98_688}


def parameters(name: str) -> int:
    config = load_preset(name)
    if isinstance(config, SimpleLMConfig):
        return build_model(config).num_params
    return count_params(transformer_specs(config))


claims = Claims("parameter_counts")
counts = {name: parameters(name) for name in preset_names()}
for name, expected in EXPECTED.items():
    claims.check(f"{name}: {expected:,} parameters", bound=expected, measured=counts[name], ok=counts[name] == expected)
claims.finish(counts=counts)
