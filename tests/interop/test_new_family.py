"""One class is enough for a new family: the StableLM of docs/extending.md, exported, read back, and compared."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from interop_fixtures import model_of, tokens

from tapeless.config import load_preset
from tapeless.data.tokenizer import ByteTokenizer
from tapeless.interop.families import FAMILIES, Family, family_of
from tapeless.interop.generation import Generation
from tapeless.interop.gguf_export import export_gguf
from tapeless.interop.hf_export import export_hugging_face
from tapeless.interop.hf_import import read_model
from tapeless.verify.hf_levels import check_family, family_cases
from test_docs import ROOT, blocks


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Family]:
    monkeypatch.chdir(tmp_path)
    (example,) = [block for block in blocks(ROOT / "docs" / "extending.md", "python") if "class StableLM" in block]
    exec(example, {})
    yield FAMILIES["StableLmForCausalLM"]
    del FAMILIES["StableLmForCausalLM"]


def test_what_no_family_expressed_is_exported_and_imported(family: Family, tmp_path: Path):
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


def test_gguf_follows_from_the_same_table(family: Family, tmp_path: Path):
    gguf = pytest.importorskip("gguf")
    model = model_of(load_preset("tiny"))
    export_gguf(tmp_path / "x.gguf", model.config, model.params, ByteTokenizer(), Generation())
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    assert reader.fields["stablelm.attention.layer_norm_epsilon"].contents() == pytest.approx(model.config.norm_eps)
    found = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    assert found["blk.1.ffn_norm.bias"].equal(model.params["blocks.1.ffn_norm.b"])
    assert len(found) == len(model.params)


def test_gradients_are_compared_with_transformers(family: Family):
    pytest.importorskip("transformers")
    (case,) = (case for case in family_cases() if case.family is family)
    findings = list(check_family(case, "float64"))
    assert len(findings) > 20
    assert [str(finding) for finding in findings if not finding.ok] == []
