"""The private APIs of torch, numba and llvmlite: each exists in the installed version, none is missing from the table, and
without an optional one the alternative that the table names is used. Runs under any version of the libraries."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import tapeless
from tapeless.errors import MissingError
from tapeless.kernels import choose, private_api
from tapeless.kernels.private_api import PRIVATE_APIS, PrivateAPI, distinct_bytes, exists, find

SOURCE = Path(tapeless.__file__).parent
# Benchmarks load torch's compiler, which is not imported elsewhere.
FILES = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "bench"]
USED = re.compile(r"\btorch(?:\.\w+)*\._[a-z]\w*|\bnumba\.core(?!\.config)\b[\w.]*|\w\._(?:version|base|cdata|schema)\b")


@pytest.mark.parametrize("api", PRIVATE_APIS, ids=lambda api: f"{api.path} in {api.used_by}")
def test_it_exists_in_the_installed_version(api: PrivateAPI):
    library = api.path.partition(".")[0]
    if not find_spec(library):
        pytest.skip(f"{library} is not installed")
    if "mkldnn" in api.path and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    assert exists(api.path), f"{library} {find(library).__version__} lacks it; without: {api.without or 'nothing works'}"


@pytest.mark.parametrize("api", PRIVATE_APIS, ids=lambda api: f"{api.path} in {api.used_by}")
def test_it_is_used_where_the_table_says(api: PrivateAPI):
    assert api.path.rpartition(".")[2] in (SOURCE / api.used_by).read_text()


def test_none_is_used_that_is_not_in_the_table():
    known = {part for api in PRIVATE_APIS for part in api.path.split(".")}
    found = {(path.name, use) for path in FILES for use in USED.findall(path.read_text())}
    assert found
    unknown = {(name, use) for name, use in found if not all(part in known for part in use.split(".") if len(part) > 1)}
    assert not unknown


def test_a_missing_name_is_found_out():
    assert not exists("torch.ops.aten._no_such_attention")
    assert not exists("torch._no_such_matmul")
    assert not exists("no_such_library.part")


def test_without_numbas_internals_the_reference_ops_run(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("numba")

    monkeypatch.setattr("numba.core.registry.cpu_target", object())
    for name in [name for name in sys.modules if name.startswith("tapeless.kernels.cpu")]:
        monkeypatch.delitem(sys.modules, name)
    choice = choose.choose("auto", torch.device("cpu"), "float32")
    assert choice.ops.name == "reference"
    assert "target_context" in choice.reason
    with pytest.raises(MissingError, match="target_context"):
        choose.choose("cpu", torch.device("cpu"), "float32")


def test_without_the_scaled_matmul_fp8_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.delattr(torch, "_scaled_mm")
    with pytest.raises(MissingError, match="_scaled_mm"):
        choose.choose("auto", torch.device("cuda"), "fp8")


def test_without_the_librarys_attention_its_own_kernel_runs(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    from tapeless.kernels.triton import library_attention

    q = torch.zeros(1, 2, 4, 8)
    monkeypatch.setattr(library_attention, "CAN", {"cudnn": lambda params: True, "flash": lambda params: True})

    def missing(*args: object) -> None:
        raise AttributeError("'_OpNamespace' 'aten' object has no attribute '_scaled_dot_product_cudnn_attention'")

    monkeypatch.setattr(library_attention, "LIBRARIES", dict.fromkeys(("cudnn", "flash"), (missing, missing)))
    assert library_attention.Chosen._tried(q, q, ("cudnn", "flash")) is None


def test_distinct_bytes():
    x = torch.empty(10, 10)
    assert distinct_bytes((x, x.view(10, 10), 7, None)) == 400
    assert distinct_bytes((x, x[1:], torch.empty_like(x))) == 400 + 360 + 400
    assert private_api.storage_id(x.untyped_storage()) == private_api.storage_id(x[3:].untyped_storage())
