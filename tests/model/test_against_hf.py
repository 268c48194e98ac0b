"""The same weights in transformers: logits, loss and every gradient, in float64 and float32."""

from typing import Any

import pytest

pytest.importorskip("transformers")

from tapeless.config import ModelConfig
from tapeless.interop.families import FAMILIES
from tapeless.verify.hf_levels import BOUNDS, FamilyCase, check_family, family_cases, level_3, missing

GPT2 = {"norm": "layer", "norm_bias": True, "position": "learned", "ffn": "gelu", "attn_bias": True, "ffn_bias": True}
SIZES = {"vocab_size": 23, "num_layers": 2, "num_heads": 4, "max_seq_len": 9, "intermediate_dim": 13}
ODD: list[tuple[str, dict[str, Any]]] = [
    ("LlamaForCausalLM", {"hidden_dim": 8, "num_kv_heads": 1, "intermediate_dim": 5}),
    ("LlamaForCausalLM", {"hidden_dim": 24, "head_dim": 10, "num_kv_heads": 4, "tie_embeddings": True, "rope_theta": 5e5}),
    ("LlamaForCausalLM", {"hidden_dim": 24, "num_layers": 1, "attn_bias": True, "num_kv_heads": 2}),
    ("LlamaForCausalLM", {"hidden_dim": 24, "num_layers": 3, "ffn_bias": True, "num_heads": 3, "num_kv_heads": 3}),
    ("Qwen3ForCausalLM", {"hidden_dim": 24, "qk_norm": True, "num_kv_heads": 1, "tie_embeddings": True}),
    ("Qwen3ForCausalLM", {"hidden_dim": 20, "head_dim": 8, "qk_norm": True, "attn_bias": True, "norm_eps": 1e-3}),
    ("GPT2LMHeadModel", {"hidden_dim": 12, "intermediate_dim": 31, "num_heads": 3, "tie_embeddings": True, **GPT2}),
    ("GPT2LMHeadModel", {"hidden_dim": 24, "num_layers": 3, "norm_eps": 1e-3, "max_seq_len": 7, **GPT2}),
]
CASES = [*family_cases(), *(FamilyCase(FAMILIES[name], ModelConfig(**{**SIZES, **choices})) for name, choices in ODD)]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family.name}-{case.config.hidden_dim}")
def test_logits_loss_and_every_gradient(case: FamilyCase, dtype: str):
    findings = list(check_family(case, dtype))
    judged = {finding.tensor for finding in findings}
    assert {"logits", "loss", "embed.w", "final_norm.w", "blocks.0.attn.wq", "blocks.0.ffn.w_down"} <= judged
    assert [str(finding) for finding in findings if not finding.ok] == []


def test_the_level_runs_wherever_transformers_is():
    assert missing() is None
    assert all(finding.level == "L3" for finding in level_3())


def test_without_transformers_the_level_is_empty_and_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tapeless.verify.hf_levels.find_spec", lambda name: None)
    assert "transformers is not installed" in str(missing())
    assert list(level_3()) == []
