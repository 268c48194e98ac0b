"""The check before a run's first step: silent on a healthy model, loud on ops that are wrong."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tapeless.config import ModelConfig, SimpleLMConfig, load_preset
from tapeless.kernels import choose
from tapeless.model.build import build_model
from tapeless.ops.op import Op
from tapeless.ops.reference import REFERENCE
from tapeless.verify import first_batch
from tapeless.verify.finding import Finding
from tapeless.verify.first_batch import CHECKED, first_batch_findings

SMALL: dict[str, Any] = {
    "vocab_size": 65,
    "hidden_dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_dim": 48,
    "max_seq_len": 40,
}
GPT2: dict[str, Any] = {
    "norm": "layer",
    "norm_bias": True,
    "position": "learned",
    "ffn": "gelu",
    "ffn_bias": True,
    "attn_bias": True,
    "tie_embeddings": True,
}
CONFIGS = {
    "llama": ModelConfig(**SMALL, num_kv_heads=2),
    "gpt2": ModelConfig(**SMALL, **GPT2),
    "dropout": ModelConfig(**SMALL, dropout=0.2, label_smoothing=0.1, z_loss=1e-3),
    "post-norm": ModelConfig(**SMALL, norm_placement="post", position="none", ffn="tanh", tie_embeddings=True),
    "deep": ModelConfig(**{**SMALL, "num_layers": 12}, ffn="relu", init="kaiming"),  # rounding of 0.16 in bfloat16
    "simplelm": SimpleLMConfig(vocab_size=65),
}


def batch(config: ModelConfig | SimpleLMConfig, rows: int = 3) -> tuple[Tensor, Tensor]:
    text = torch.randint(config.vocab_size, (rows, 41), generator=torch.Generator().manual_seed(0))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def findings(config: ModelConfig | SimpleLMConfig, **options: Any) -> list[Finding]:
    return list(first_batch_findings(build_model(config, **options), *batch(config)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_healthy_model_passes(name: str, dtype: str):
    found = findings(CONFIGS[name], dtype=dtype)
    assert [str(finding) for finding in found if not finding.ok] == []
    assert {finding.oracle for finding in found} == {"complex step", "own float64"}


def test_a_healthy_model_passes_with_the_cpu_kernels():
    pytest.importorskip("numba")
    found = findings(CONFIGS["llama"], dtype="bfloat16", ops="cpu")
    assert [str(finding) for finding in found if not finding.ok] == []
    assert {finding.oracle for finding in found} == {"complex step", "own float64"}


@pytest.mark.parametrize("recompute", ["cheap", "full"])
def test_whatever_is_recomputed(recompute: str):
    assert all(finding.ok for finding in findings(CONFIGS["dropout"], recompute=recompute))


@pytest.mark.parametrize("preset", ["tiny", "simplelm", "shakespeare-char"])
def test_the_presets_of_the_trainer_pass(preset: str):
    for dtype in ("float32", "bfloat16"):
        assert all(finding.ok for finding in findings(load_preset(preset), dtype=dtype))


def test_the_model_is_left_as_it_was():
    model = build_model(CONFIGS["llama"])
    before = model.store.flat.clone()
    list(first_batch_findings(model, *batch(CONFIGS["llama"])))
    assert model.store.flat.equal(before)
    assert not model.store.flat_grads.any()


def test_padded_and_short_batches_pass():
    config = CONFIGS["llama"]
    tokens, targets = batch(config, rows=1)
    targets = targets.clone()
    targets[:, 5:] = -100
    assert all(finding.ok for finding in first_batch_findings(build_model(config), tokens[:, :8], targets[:, :8]))


def swollen(op: Op, factor: float) -> Op:
    """The op with the first gradient it returns too large."""

    def backward(*args: Any, **options: Any) -> Any:
        gradients = op.backward(*args, **options)
        return (factor * gradients[0], *gradients[1:]) if isinstance(gradients, tuple) else factor * gradients

    return Op(op.forward, backward)


@pytest.mark.parametrize(("dtype", "factor"), [("float32", 1.001), ("bfloat16", 1.1)])
@pytest.mark.parametrize("field", ["qkv_rope", "attention", "linear", "linear_cross_entropy"])
def test_a_broken_set_of_ops_is_caught(field: str, dtype: str, factor: float, monkeypatch: pytest.MonkeyPatch):
    """A backend of one's own, selected by name: the gradients of attention are a thousandth of all, and still looked at."""
    monkeypatch.setattr(choose, "_BACKENDS", dict(choose._BACKENDS))
    choose.register_ops("broken", replace(REFERENCE, **{field: swollen(getattr(REFERENCE, field), factor)}))
    choose.register_ops("copied", REFERENCE)
    assert all(finding.ok for finding in findings(CONFIGS["gpt2"], dtype=dtype, ops="copied"))
    failed = [finding for finding in findings(CONFIGS["gpt2"], dtype=dtype, ops="broken") if not finding.ok]
    assert {finding.oracle for finding in failed} == {"own float64"}
    with monkeypatch.context() as only:
        only.setattr("tapeless.verify.first_batch.CHECKED", 100)
        failed = [finding for finding in findings(CONFIGS["gpt2"], dtype=dtype, ops="broken") if not finding.ok]
        assert {finding.oracle for finding in failed} == {"own float64"}


def blind(op: Op) -> Op:
    """Attention whose backward forgets where documents end."""
    return Op(op.forward, lambda do, saved: op.backward(do, saved._replace(documents=None)))


def test_documents_are_kept_apart_in_the_check_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choose, "_BACKENDS", dict(choose._BACKENDS))
    choose.register_ops("blind", replace(REFERENCE, attention=blind(REFERENCE.attention)))
    choose.register_ops("copied", replace(REFERENCE, name="copied"))
    config, (tokens, targets) = CONFIGS["llama"], batch(CONFIGS["llama"])
    documents = (torch.arange(40) // 7).expand(3, 40)
    for ops, checked in (("copied", CHECKED), ("blind", CHECKED), ("copied", 100), ("blind", 100)):
        monkeypatch.setattr("tapeless.verify.first_batch.CHECKED", checked)
        found = list(first_batch_findings(build_model(config, ops=ops), tokens, targets, documents))
        assert all(finding.ok for finding in found) == (ops == "copied")


def test_documents_of_one_token_pass():
    config, (tokens, targets) = CONFIGS["llama"], batch(CONFIGS["llama"])
    found = first_batch_findings(build_model(config), tokens, targets, torch.arange(40).expand(3, 40))
    assert [str(finding) for finding in found if not finding.ok] == []


@pytest.mark.parametrize("prompt", [20, 32, 38])
def test_behind_a_long_prompt_there_is_something_to_judge(prompt: int, monkeypatch: pytest.MonkeyPatch):
    """The first 32 columns alone may hold no target, and every gradient of nothing is right."""
    monkeypatch.setattr(choose, "_BACKENDS", dict(choose._BACKENDS))
    choose.register_ops("broken", replace(REFERENCE, linear=swollen(REFERENCE.linear, 1.1)))
    choose.register_ops("copied", replace(REFERENCE, name="copied"))
    config, (tokens, targets) = CONFIGS["llama"], batch(CONFIGS["llama"])
    targets[:, :prompt] = -100
    for ops in ("copied", "broken"):
        found = list(first_batch_findings(build_model(config, ops=ops), tokens, targets))
        assert all(finding.ok for finding in found) == (ops == "copied")


def test_a_wrong_reference_is_caught_by_the_complex_step(monkeypatch: pytest.MonkeyPatch):
    """Then the float64 copy is wrong in the same way, and only an oracle from outside can tell."""
    from tapeless.model import simple_lm

    monkeypatch.setattr(simple_lm, "GELU", swollen(simple_lm.GELU, 1.001))
    assert {finding.oracle for finding in findings(CONFIGS["simplelm"]) if not finding.ok} == {"complex step"}


def test_a_large_model_has_its_architecture_checked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tapeless.verify.first_batch.CHECKED", 100)
    found = findings(CONFIGS["llama"])
    assert all(finding.ok for finding in found)
    assert {finding.check for finding in found} == {"architecture", "architecture, float32"}
    assert CHECKED > 1_000_000


IMPORTED = {"first_batch", "finding", "fixtures", "oracles", "tolerances"}


def test_it_imports_little_of_the_package():
    """Every training run imports it."""
    seen, left = set[str](), ["first_batch"]
    while left:
        seen.add(name := left.pop())
        source = (Path(first_batch.__file__).parent / f"{name}.py").read_text()
        left += set(re.findall(r"^from tapeless\.verify\.(\w+) import", source, re.M)) - seen
    assert seen == IMPORTED
