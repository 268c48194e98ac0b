"""Which ops a model uses: chosen once, by name or automatically, and never replaced in silence."""

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tapeless.errors import ConfigError, MissingError
from tapeless.kernels import choose as choose_module
from tapeless.kernels.choose import choose, register_ops
from tapeless.model.transformer import Transformer
from tapeless.ops.op import Op
from tapeless.ops.reference import REFERENCE
from tapeless.verify.fixtures import TRANSFORMER_CASES, batch

CPU = torch.device("cpu")
CONFIG = TRANSFORMER_CASES[0].config


class Counted:
    """An op that counts its calls and is otherwise the one it wraps."""

    def __init__(self, op: Op):
        self.op, self.forwards, self.backwards = op, 0, 0

    def forward(self, *args, **kwargs):
        self.forwards += 1
        return self.op.forward(*args, **kwargs)

    def backward(self, *args, **kwargs):
        self.backwards += 1
        return self.op.backward(*args, **kwargs)


@pytest.fixture
def attention() -> Iterator[Counted]:
    counted = Counted(REFERENCE.attention)
    register_ops(
        "mine",
        replace(REFERENCE, attention=Op(counted.forward, counted.backward)),
        devices=["cpu"],
        dtypes=["float32", "float64"],
    )
    yield counted
    del choose_module._BACKENDS["mine"]


def test_a_set_that_is_built_is_each_models_own():
    built = []

    def build():
        built.append(replace(REFERENCE, linear=REFERENCE.linear._replace()))
        return built[-1]

    register_ops("built", build)
    try:
        first, second = (Transformer(CONFIG, ops="built") for _ in range(2))
        assert len(built) == 2
        assert first.ops.linear is built[0].linear
        assert second.ops.linear is built[1].linear
        assert (first.ops.name, first.ops.non_accumulating, first.ops.decoder) == ("built", None, None)
    finally:
        del choose_module._BACKENDS["built"]


def test_what_is_no_set_is_refused():
    for name, ops in (("none", None), ("", REFERENCE)):
        with pytest.raises(ConfigError, match="a name and an OpSet"):
            register_ops(name, ops)


def test_what_a_set_replaces_is_used_in_every_step():
    """Also in a step that writes its gradients afresh, and when a token is decoded: built-in sets have shortcuts for both."""
    pytest.importorskip("numba")
    from tapeless.kernels.cpu.ops import cpu_ops

    counted = Counted(REFERENCE.linear)
    register_ops("patched", lambda: replace(cpu_ops(), linear=Op(counted.forward, counted.backward)), devices=["cpu"])
    try:
        model = Transformer(CONFIG, ops="patched")
        tokens, targets = batch()
        model.forward_backward(tokens, targets, accumulate=False)
        assert counted.backwards == 3 * CONFIG.num_layers
        before, first = counted.forwards, torch.zeros(1, dtype=torch.int64)
        model.decode(tokens[0, :1], first, first, model.kv_cache(1, 4))
        assert counted.forwards > before
    finally:
        del choose_module._BACKENDS["patched"]


def test_a_set_of_ones_own_is_used(attention: Counted):
    model = Transformer(CONFIG, ops="mine")
    assert (model.ops.name, model.ops_reason) == ("mine", "requested by name")
    model.forward(*batch())
    model.backward()
    assert (attention.forwards, attention.backwards) == (CONFIG.num_layers, CONFIG.num_layers)
    reference = Transformer(CONFIG, ops="reference")
    reference.forward(*batch())
    reference.backward()
    assert torch.equal(model.store.flat_grads, reference.store.flat_grads)


def test_a_set_that_cannot_run_there_is_an_error(attention: Counted):
    with pytest.raises(MissingError, match="ops 'mine' cannot run with dtype bfloat16; it has float32, float64"):
        Transformer(CONFIG, ops="mine", dtype="bfloat16")
    with pytest.raises(MissingError, match="ops 'mine' cannot run with device cuda; it has cpu"):
        choose("mine", torch.device("cuda"), "float32")


def test_unknown_names_have_a_hint(attention: Counted):
    with pytest.raises(ConfigError, match="unknown set of ops 'mime'; did you mean 'mine'"):
        choose("mime", CPU, "float32")
    with pytest.raises(ConfigError, match="unknown set of ops 'xyz'; expected one of auto, reference, cpu"):
        choose("xyz", CPU, "float32")


@pytest.mark.parametrize("name", ["auto", "reference", "mine"])
def test_a_taken_name_is_refused(attention: Counted, name: str):
    with pytest.raises(ConfigError, match=f"a set of ops named '{name}' already exists"):
        register_ops(name, REFERENCE)


def test_auto_says_what_it_chose(caplog: pytest.LogCaptureFixture):
    pytest.importorskip("numba")
    with caplog.at_level(logging.INFO, "tapeless"):
        ops, reason = choose("auto", CPU, "float32")
    assert ops.name == "cpu"
    assert caplog.messages[-1] == f"ops: cpu ({reason})"
    assert reason == "the built-in kernels for cpu in float32"


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_auto_is_the_reference_where_the_kernels_cannot_run(dtype: str):
    ops, reason = choose("auto", CPU, dtype)
    assert ops is REFERENCE
    assert reason == f"plain torch: ops 'cpu' cannot run with dtype {dtype}; it has bfloat16, float32"


def test_auto_without_numba(monkeypatch: pytest.MonkeyPatch):
    """A missing library is a reason, not a crash; requested by name it is an error."""
    for name in [name for name in sys.modules if name.startswith(("numba", "llvmlite", "tapeless.kernels.cpu"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "numba", None)
    ops, reason = choose("auto", CPU, "float32")
    assert ops is REFERENCE
    assert reason.startswith("plain torch: ops 'cpu' are compiled by numba, which cannot be used here")
    with pytest.raises(MissingError, match="compiled by numba"):
        choose("cpu", CPU, "float32")


@pytest.mark.parametrize("kind", ["mps", "xpu", "rocm"])
def test_other_accelerators_run_on_the_reference_set(kind: str, monkeypatch: pytest.MonkeyPatch):
    if kind == "rocm":  # which torch calls cuda
        monkeypatch.setattr(torch.version, "hip", "7.0")
    choice = choose("auto", torch.device("cuda" if kind == "rocm" else kind), "bfloat16")
    assert choice.ops is REFERENCE
    assert choice.reason == f"plain torch: there are no built-in kernels for {kind}"


@pytest.mark.parametrize("ops", ["auto", "reference", "cpu"])
def test_fp8_is_never_replaced_by_another_precision(ops: str):
    with pytest.raises(MissingError, match="fp8"):
        choose(ops, CPU, "fp8")


def test_fp8_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch):
    """The model's own, which need not be the current device."""
    capability = {0: (9, 0), 1: (8, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability[device.index if device else 0])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"GPU {device.index if device else 0}")
    with pytest.raises(MissingError, match="cuda:1 is GPU 1"):
        choose("auto", torch.device("cuda:1"), "fp8")
    pytest.importorskip("triton")
    assert choose("auto", torch.device("cuda:0"), "fp8").ops.name == "triton-fp8"
