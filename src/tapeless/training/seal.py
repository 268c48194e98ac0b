"""What determines the result of a run: gathered here, stored in every checkpoint (`seal` of state.json), compared here.

    model.* train.* data.* plugins.*    the configuration, without what may change freely; of files the hash of their content
    ops, code, numba.*, triton, gpu …   what computes: the ops in use, their sources and libraries, and settings of those
A flat record of readable values, so that a difference has a name. A resume refuses or announces differences (runs.py, the
trainer), whoever loads a model refuses another model (require_same_model), and `tapeless train verify` names them.
Tested by: tests/train/test_seal.py, tests/faults/test_moved.py."""

import hashlib
import os
from collections.abc import Collection, Mapping
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tapeless.errors import EDITED
from tapeless.model.build import AnyModel
from tapeless.model.sublayer import source_file
from tapeless.ops.op import Op, OpSet
from tapeless.training.run_config import FREE, FROZEN, PATHS, Change, RunConfig
from tapeless.training.run_dir import cpu_name

# Sources that decide about bits, beside those of the ops' own files.
SOURCES: tuple[str, ...] = ("ops", "kernels", "model", "optim")
SOURCES += ("dist/gradient_sum.py", "dist/world.py")
SOURCES += tuple(f"data/{name}.py" for name in ("loader", "rng", "instructions", "token_files"))
SOURCES += tuple(
    f"training/{name}.py" for name in ("step", "captured_step", "plan", "guard", "trainer", "prefetch", "functions")
)
# Environment variables that select code in torch's libraries. oneDNN reads each of its own by two names.
ONEDNN = ("MAX_CPU_ISA", "DEFAULT_FPMATH_MODE")
VARIABLES: tuple[str, ...] = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DYNAMIC", "MKL_NUM_STRIPES")
VARIABLES += ("OMP_DYNAMIC", *(f"{prefix}_{name}" for name in ONEDNN for prefix in ("ONEDNN", "DNNL")))
VARIABLES_OF_GPUS: tuple[str, ...] = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "NVIDIA_TF32_OVERRIDE")
VARIABLES_OF_GPUS += ("TRITON_DEFAULT_FP_FUSION", "DISABLE_PTXAS_OPT", "TRITON_PTXAS_PATH")
AT_TOP = ("threads", "torch_version", "world_size")  # of state.json: also in checkpoints without a seal
TABLES = ("model", "simplelm", "train", "data", "plugins")
LAST_BITS = ("train.device", "train.dtype", "train.ops")  # settings that change how is computed, not what
ABSENT = "not set"

Seal = Mapping[str, Any]


class Difference(NamedTuple):
    name: str
    old: Any
    new: Any

    @property
    def of_config(self) -> bool:
        return self.name.partition(".")[0] in TABLES

    def __str__(self) -> str:
        values = (ABSENT if value is None else value for value in (self.old, self.new))
        return f"{self.name.removeprefix('train.')} was {{}}, is {{}}".format(*values)


def config_seal(config: RunConfig) -> dict[str, Any]:
    """The configuration as far as it determines the result. Where files lie does not: their hashes are in [data]. Of the ops,
    those that were chosen are recorded, not what was asked for."""
    fields = {f"{table}.{name}": value for table, values in config.tables().items() for name, value in values.items()}
    left_out = {f"train.{name}" for name in (*FREE, "ops")} | {f"{table}.{name}" for table, name in PATHS}
    return {name: value for name, value in fields.items() if name not in left_out}


def seal_of(config: RunConfig, model: AnyModel) -> dict[str, Any]:
    """Of a run that is trained by this process. Takes milliseconds, once."""
    return config_seal(config) | software_seal(model)


def software_seal(model: AnyModel) -> dict[str, Any]:
    """What computes a model's steps, but for AT_TOP, which a checkpoint records by itself."""
    found: dict[str, Any] = {"ops": model.ops.name, "code": f"sha256:{_code()[:16]}"}
    found |= _library_settings(model.ops)
    found |= {"cpu": _cpu(), **_torch_settings(model.device.type)}
    if model.device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(model.device), "cuda": torch.version.cuda}
        found["cudnn"] = torch.backends.cudnn.version()
    variables = VARIABLES + (VARIABLES_OF_GPUS if model.device.type == "cuda" else ())
    return found | {f"env.{name}": os.environ[name] for name in variables if name in os.environ}


def _torch_settings(device: str) -> dict[str, Any]:
    """Flags of torch that any Python code may set, and that select how a matmul is computed."""
    backends: Any = torch.backends
    onednn, cuda = backends.mkldnn, backends.cuda
    found: dict[str, Any] = {"deterministic": torch.are_deterministic_algorithms_enabled()}
    found |= {"onednn": onednn.enabled, "fp32_precision": onednn.matmul.fp32_precision}
    if device == "cuda":
        found |= {"fp32_precision": cuda.matmul.fp32_precision, "blas": cuda.preferred_blas_library().name}
        found["bf16_reduction"] = str(cuda.matmul.allow_bf16_reduced_precision_reduction)
    return found


def _library_settings(ops: OpSet) -> dict[str, str]:
    """The compilers of a set's kernels, with the settings that change their code, and the files of ops that are not ours."""
    functions: list[Any] = [ops.adam_update, ops.grad_norm]

    def collect(name: str, op: Op) -> Op:
        functions.extend((op.forward, op.backward, op.both, op.backward_dw))
        return op

    ops.map(collect)
    plain = [function.func if isinstance(function, partial) else function for function in functions if function is not None]
    homes = {function.__module__: function for function in plain}
    found: dict[str, str] = {}
    if any(home.startswith("tapeless.kernels.cpu") for home in homes):
        from tapeless.kernels.cpu.jit import settings

        found |= {f"numba.{name}": value for name, value in settings().items()}
    if any(home.startswith("tapeless.kernels.triton") for home in homes):
        found["triton"] = version("triton")
    for home, function in homes.items():
        if not home.startswith("tapeless."):
            file = source_file(function)
            found[f"ops.{home}"] = f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()[:16]}" if file else "no file"
    return found


@cache
def _cpu() -> str:
    return f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"


@cache
def _code() -> str:
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for part in SOURCES:
        path = root / part
        for file in [path] if path.suffix else sorted(path.rglob("*.py")):
            digest.update(f"{file.relative_to(root).as_posix()}\n".encode())
            digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()


def differences(
    state: Mapping[str, Any], now: Seal | None, changes: Collection[Change] = (), *, ranks: int | None = None
) -> list[Difference]:
    """Between what a checkpoint's state records and this process. Where either has no seal, AT_TOP is known alone, and what
    overrides change. ranks: how many train here; None if their number does not matter."""
    here = {"threads": torch.get_num_threads(), "torch_version": torch.__version__}
    here["world_size"] = state["world_size"] if ranks is None else ranks
    old = {name: state[name] for name in AT_TOP}
    if state["seal"] is not None and now is not None:
        return _between({**old, **state["seal"]}, {**here, **now})
    changed = [Difference(f"{c.table}.{c.name}", c.old, c.new) for c in changes if c.kind != "free"]
    return _between(old, here) + changed


def _between(old: Seal, new: Seal) -> list[Difference]:
    return [Difference(name, old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)]


def trained_with(state: Mapping[str, Any] | None, *, frozen: bool) -> dict[str, Any]:
    """The fields `table.name` of a checkpoint's configuration: those that are fixed for the life of a run, or all. A plugin's
    file is compared by itself (plugins.py)."""
    seal = (state or {}).get("seal") or {}
    return {name: x for name, x in seal.items() if is_frozen(name) or (name.startswith("train.") and not frozen)}


def is_frozen(name: str) -> bool:
    """Whether a field `table.name` is fixed for the life of a run."""
    table, _, field = name.partition(".")
    return table in ("model", "simplelm", "data") or (table == "train" and field in FROZEN)


def require_same_model(state: Mapping[str, Any], config: RunConfig, where: Path) -> None:
    """Refuse, field by field, a configuration that describes another model than the one a checkpoint holds."""
    if found := config_differences(state, config, frozen=True):
        raise EDITED(where=where, step=state["step"], fields="; ".join(listed(found)))


def config_differences(state: Mapping[str, Any], config: RunConfig, *, frozen: bool) -> list[Difference]:
    """Between the configuration that a checkpoint was trained with and another; frozen: of what is fixed for a run alone."""
    trained = trained_with(state, frozen=frozen)
    now = trained_with({"seal": config_seal(config)}, frozen=frozen)
    return _between(trained, now) if trained else []


def listed(found: Collection[Difference]) -> list[str]:
    return [f"{d.name} is {d.new!r}, expected {d.old!r}" for d in found]


def announcements(found: Collection[Difference]) -> list[str]:
    """One line for each effect that differences have on what a resumed run computes."""
    config = [d for d in found if d.of_config and d.name not in LAST_BITS]
    compilers = [d for d in found if d.name.startswith(("numba.", "triton")) and None in (d.old, d.new)]  # `ops` says it
    lines = {
        "the last bits may differ from an uninterrupted run": [d for d in found if d not in config + compilers],
        "the steps from here on differ from those of an unchanged run": config,
    }
    return [f"{effect}: {'; '.join(map(str, which))}" for effect, which in lines.items() if which]
