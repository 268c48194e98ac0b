"""One file is enough for a new family: this one adds StableLM at run time, exports through it, and reads it back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from interop_fixtures import model_of, tokens

from tapeless.config import ModelConfig, load_preset
from tapeless.data.tokenizer import ByteTokenizer
from tapeless.interop.families import FAMILIES, family_of, register
from tapeless.interop.families.llama import ROTARY_TENSORS, Llama
from tapeless.interop.family import EXAMPLE
from tapeless.interop.generation import Generation
from tapeless.interop.gguf_export import export_gguf
from tapeless.interop.hf_export import export_hugging_face
from tapeless.interop.hf_import import read_model
from tapeless.verify.hf_levels import check_family, family_cases

NORMS = ("blocks.{i}.attn_norm.", "blocks.{i}.ffn_norm.", "final_norm.")


def with_bias(row):
    """A LayerNorm's row, for its weight and its bias."""
    names = [name.replace(".weight", ".{weight}") for name in row[1:3]]
    return row._replace(params=(row.params[0][:-1] + "{w}",), hf=names[0], gguf=names[1])


class StableLM(Llama):
    """A Llama with LayerNorm, and without any other bias."""

    name = "StableLmForCausalLM"
    model_type = gguf_architecture = "stablelm"
    fixed: ClassVar = {**Llama.fixed, "norm": "layer", "norm_bias": True, "attn_bias": False, "ffn_bias": False}
    keys: ClassVar = {
        **{key: Llama.keys[key] for key in Llama.keys if key not in ("head_dim", "rms_norm_eps", "attention_bias", "mlp_bias")},
        "layer_norm_eps": ("norm_eps", 1e-5),
    }
    neutral: ClassVar = {"use_parallel_residual": (False,), "qk_layernorm": (False,), "use_qkv_bias": (False,)}
    tensors = tuple(with_bias(row) if row.params[0].startswith(NORMS) else row for row in ROTARY_TENSORS)
    gguf_keys: ClassVar = {**Llama.gguf_keys, "attention.layer_norm_epsilon": "norm_eps"}
    examples = (ModelConfig(hidden_dim=24, num_kv_heads=2, norm="layer", norm_bias=True, **EXAMPLE),)

    def settings(self, config: ModelConfig) -> dict[str, Any]:
        found = super().settings(config)
        return {**found, "rope_parameters": {**found["rope_parameters"], "partial_rotary_factor": 1.0}}


@pytest.fixture
def family() -> Iterator[StableLM]:
    register(StableLM())
    yield FAMILIES["StableLmForCausalLM"]
    del FAMILIES["StableLmForCausalLM"]


def test_what_no_family_expressed_is_exported_and_imported(family: StableLM, tmp_path: Path):
    config = load_preset("tiny")
    assert family_of(config) is family
    model = model_of(config)
    export_hugging_face(tmp_path / "hf", config, model.params, ByteTokenizer(), Generation())
    back = read_model(tmp_path / "hf")
    assert (back.family, back.config) == (family, config)
    assert all(back.params[name].equal(w) for name, w in model.params.items())
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        assert (theirs(tokens()).logits - model.logits(tokens())).abs().max() < 1e-4


def test_gguf_follows_from_the_same_table(family: StableLM, tmp_path: Path):
    gguf = pytest.importorskip("gguf")
    model = model_of(load_preset("tiny"))
    export_gguf(tmp_path / "x.gguf", model.config, model.params, ByteTokenizer(), Generation())
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    assert reader.fields["stablelm.attention.layer_norm_epsilon"].contents() == pytest.approx(model.config.norm_eps)
    found = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    assert found["blk.1.ffn_norm.bias"].equal(model.params["blocks.1.ffn_norm.b"])
    assert len(found) == len(model.params)


def test_gradients_are_compared_with_transformers(family: StableLM):
    pytest.importorskip("transformers")
    (case,) = (case for case in family_cases() if case.family is family)
    findings = list(check_family(case, "float64"))
    assert len(findings) > 20
    assert [str(finding) for finding in findings if not finding.ok] == []
