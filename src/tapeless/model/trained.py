"""Which parameters of a model train: all, all but those that a pattern freezes, or LoRA adapters only.

    freeze    comma-separated patterns of parameter names: "embed*,blocks.0.*"
    lora      adds two small matrices to each target, `NAME.lora_a` (r, I) and `NAME.lora_b` (O, r); everything else is frozen
Frozen parameters have no gradient and no optimizer state. They follow the trained ones in the flat buffer (params.py), so that
optimizers see a buffer of trained parameters only. An adapter starts as zero, because b is zero.
Tested by: tests/model/test_trained.py, tests/model/test_adapters.py."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor

from tapeless.config import Lora, nearest
from tapeless.errors import ConfigError
from tapeless.model.params import FlatLayout, ParamSpec


def layouts(specs: Sequence[ParamSpec], freeze: str, lora: Lora | None) -> tuple[FlatLayout, FlatLayout]:
    """The layout of all parameters, and of those that train, at the same offsets."""
    if lora and freeze:
        raise ConfigError("lora freezes everything but its adapters: leave out freeze")
    adapters = adapter_specs(specs, lora) if lora else []
    frozen = list(specs) if lora else frozen_specs(specs, freeze)
    still = {spec.name for spec in frozen}
    trained = [*(spec for spec in specs if spec.name not in still), *adapters]
    if not trained:
        raise ConfigError(f"freeze = {freeze!r} leaves nothing to train")
    everything = FlatLayout([*trained, *frozen])
    return everything, FlatLayout(trained) if frozen else everything


def frozen_specs(specs: Sequence[ParamSpec], freeze: str) -> list[ParamSpec]:
    patterns = [pattern.strip() for pattern in freeze.split(",") if pattern.strip()]
    for pattern in patterns:
        if not any(fnmatchcase(spec.name, pattern) for spec in specs):
            raise ConfigError(f"freeze: no parameter is named {pattern!r}; {nearest(pattern, [spec.name for spec in specs])}")
    frozen = [spec for spec in specs if any(fnmatchcase(spec.name, pattern) for pattern in patterns)]
    for group in _groups(specs):
        left = [spec.name for spec in group if spec not in frozen]
        if left and len(left) < len(group):
            raise ConfigError(
                f"freeze: one matmul reads {', '.join(spec.name for spec in group)} as one matrix, so they can only be frozen "
                f"together; freeze {', '.join(left)} too, or none"
            )
    return frozen


def _groups(specs: Sequence[ParamSpec]) -> Iterator[list[ParamSpec]]:
    """Parameters that are adjacent because one matmul reads them."""
    group: list[ParamSpec] = []
    for spec in specs:
        if group and not spec.joined:
            yield group
            group = []
        group.append(spec)
    yield group


def adapter_specs(specs: Sequence[ParamSpec], lora: Lora) -> list[ParamSpec]:
    """Two for each target matrix, block by block."""
    linear = [spec for spec in specs if spec.is_linear and spec.name.startswith("blocks.")]
    present = list(dict.fromkeys(_kind(spec) for spec in linear))
    targets = present if lora.targets == "all-linear" else [target.strip() for target in lora.targets.split(",")]
    for target in targets:
        if target == "all-linear":
            raise ConfigError(f"lora_targets {lora.targets!r}: all-linear cannot be combined with names")
        if target not in present:
            raise ConfigError(f"lora_targets: this model has no {target!r}; {nearest(target, ['all-linear', *present])}")
    found = []
    for spec in linear:
        if _kind(spec) in targets:
            O, I = spec.shape
            if lora.rank > min(O, I):
                raise ConfigError(
                    f"lora_rank {lora.rank} is above the rank that {spec.name} {spec.shape} can have, {min(O, I)}"
                )
            found += [
                ParamSpec(f"{spec.name}.lora_a", (lora.rank, I), "adapter", True, None, is_linear=True),
                ParamSpec(f"{spec.name}.lora_b", (O, lora.rank), "zeros", True, None),
            ]
    return found


def _kind(spec: ParamSpec) -> str:
    return spec.name.rpartition(".")[2]


def merged(params: Mapping[str, Tensor], adapters: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The parameters with w + s b a for each w that has an adapter; computed in float64, rounded once."""
    result = dict(params)
    for name, b in adapters.items():
        target, _, part = name.rpartition(".")
        if part == "lora_b":
            w, a = params[target], adapters[f"{target}.lora_a"]
            result[target] = (w.double() + scale * (b.double() @ a.double())).to(w.dtype)
    return result


def is_adapter(name: str) -> bool:
    return name.endswith((".lora_a", ".lora_b"))


def checkpointed(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a checkpoint holds: all parameters, or only the adapters if there are any."""
    return {name: w for name, w in params.items() if is_adapter(name)} or dict(params)


def plain(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters without adapters."""
    return {name: w for name, w in params.items() if not is_adapter(name)}
