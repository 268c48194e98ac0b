"""Which parameters of a model train: all of them, all but those that a pattern freezes, or adapters alone.

    freeze    names with * in them, separated by commas: "embed*,blocks.0.*"
    lora      beside each matrix of its targets two small ones, `NAME.lora_a` (r, I) and `NAME.lora_b` (O, r); the rest stays
What does not train has no gradient and no moments. It lies behind all that does in the flat buffer (params.py), so that
optimizers see a buffer of nothing else. An adapter begins as nothing: b is zero.
Tested by: tests/model/test_trained.py, tests/model/test_adapters.py."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor

from tapeless.config import Lora, nearest
from tapeless.errors import ConfigError
from tapeless.model.params import FlatLayout, ParamSpec

LINEAR = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")  # what an adapter can stand beside, by the end of its name


def layouts(specs: Sequence[ParamSpec], freeze: str, lora: Lora | None) -> tuple[FlatLayout, FlatLayout]:
    """Where everything lies, and, at the same places, that part of it which trains."""
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
                f"freeze: {', '.join(spec.name for spec in group)} are one matrix to the product that reads them, "
                f"so that they freeze together; freeze {', '.join(left)} too, or none"
            )
    return frozen


def _groups(specs: Sequence[ParamSpec]) -> Iterator[list[ParamSpec]]:
    """Parameters that lie side by side because one product reads them."""
    group: list[ParamSpec] = []
    for spec in specs:
        if group and not spec.joined:
            yield group
            group = []
        group.append(spec)
    yield group


def adapter_specs(specs: Sequence[ParamSpec], lora: Lora) -> list[ParamSpec]:
    """Two for each matrix that is a target, block by block."""
    present = [kind for kind in LINEAR if any(_kind(spec) == kind for spec in specs)]
    targets = present if lora.targets == "all-linear" else [target.strip() for target in lora.targets.split(",")]
    for target in targets:
        if target == "all-linear":
            raise ConfigError(f"lora_targets {lora.targets!r}: all-linear stands alone; leave it or the others out")
        if target not in present:
            raise ConfigError(f"lora_targets: this model has no {target!r}; {nearest(target, ['all-linear', *present])}")
    found = []
    for spec in specs:
        if _kind(spec) in targets:
            O, I = spec.shape
            if lora.rank > min(O, I):
                raise ConfigError(
                    f"lora_rank {lora.rank} is above the rank that {spec.name} {spec.shape} can have, {min(O, I)}"
                )
            found += [
                ParamSpec(f"{spec.name}.lora_a", (lora.rank, I), "adapter", True, None),
                ParamSpec(f"{spec.name}.lora_b", (O, lora.rank), "zeros", True, None),
            ]
    return found


def _kind(spec: ParamSpec) -> str:
    return spec.name.rpartition(".")[2]


def merged(params: Mapping[str, Tensor], adapters: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The parameters with w + s b a in the place of each w that has an adapter; multiplied in float64, rounded once."""
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
    """What a checkpoint holds: all parameters, or, where there are adapters, those alone."""
    return {name: w for name, w in params.items() if is_adapter(name)} or dict(params)


def plain(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of the model itself."""
    return {name: w for name, w in params.items() if not is_adapter(name)}
