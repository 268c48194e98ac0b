"""The GGUF file read by the package `gguf`: names, shapes, order, metadata, tokens. llama.cpp itself: acceptance/."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interop_fixtures import GPT2, TOKENIZER, model_of

from tapeless.config import ModelConfig
from tapeless.data.bpe import train_bpe
from tapeless.data.chat import CHATML
from tapeless.data.tokenizer import SPECIAL, ByteTokenizer, Tokenizer
from tapeless.errors import ConfigError, MissingError
from tapeless.interop.family import interleave
from tapeless.interop.generation import Generation
from tapeless.interop.gguf_export import UNREACHABLE_MERGE, export_gguf, token_lists, with_mean_row

gguf = pytest.importorskip("gguf")

SIZES: dict[str, Any] = {"vocab_size": 280, "hidden_dim": 32, "num_layers": 2, "intermediate_dim": 48, "max_seq_len": 20}
BPE = train_bpe(["the quick brown fox jumps over the lazy dog, " * 20], 280)


def written(folder: Path, config: ModelConfig, tokenizer: Tokenizer = BPE, dtype: str = "float32", **generation: Any):
    """The model, the file, and the notes."""
    model = model_of(config)
    notes = export_gguf(folder / "x.gguf", config, model.params, tokenizer, Generation(**generation), dtype=dtype)
    assert [path.name for path in folder.iterdir()] == ["x.gguf"]
    return model, gguf.GGUFReader(folder / "x.gguf"), notes


def value(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


def tensors(reader: Any) -> dict[str, torch.Tensor]:
    return {t.name: torch.from_numpy(gguf.quants.dequantize(np.array(t.data), t.tensor_type)) for t in reader.tensors}


def test_llama(tmp_path: Path):
    config = ModelConfig(**SIZES, num_kv_heads=2, rope_theta=5e5, norm_eps=1e-3)
    model, reader, notes = written(tmp_path, config)
    expected = {
        "general.architecture": "llama",
        "general.name": "x",
        "llama.context_length": 20,
        "llama.embedding_length": 32,
        "llama.block_count": 2,
        "llama.feed_forward_length": 48,
        "llama.vocab_size": 281,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 8,
        "llama.attention.value_length": 8,
        "llama.rope.dimension_count": 8,
        "llama.rope.freq_base": 5e5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.eos_token_id": 280,
        "tokenizer.ggml.add_bos_token": False,
    }
    assert {key: value(reader, key) for key in expected} == expected
    assert value(reader, "llama.attention.layer_norm_rms_epsilon") == pytest.approx(1e-3)
    found = tensors(reader)
    for theirs, ours in {
        "blk.1.ffn_gate.weight": "blocks.1.ffn.w_gate",
        "blk.1.ffn_up.weight": "blocks.1.ffn.w_up",
        "blk.0.ffn_down.weight": "blocks.0.ffn.w_down",
        "blk.0.attn_v.weight": "blocks.0.attn.wv",
        "blk.0.attn_output.weight": "blocks.0.attn.wo",
        "blk.0.attn_norm.weight": "blocks.0.attn_norm.w",
        "blk.1.ffn_norm.weight": "blocks.1.ffn_norm.w",
        "output_norm.weight": "final_norm.w",
    }.items():
        assert found[theirs].equal(model.params[ours]), theirs
    assert found["blk.1.attn_k.weight"].equal(interleave(model.params["blocks.1.attn.wk"], 2))
    assert not found["blk.1.attn_k.weight"].equal(model.params["blocks.1.attn.wk"])
    for theirs, ours in (("token_embd.weight", "embed.w"), ("output.weight", "head.w")):
        assert found[theirs].equal(with_mean_row(model.params[ours]))
    assert len(found) == len(model.params)
    assert any("id 280" in note for note in notes)


def test_rows_are_interleaved_within_each_head():
    rows = torch.arange(8.0)[:, None]  # two heads of four: halves (0 1 | 2 3) become pairs (0 2)(1 3)
    assert interleave(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert interleave(rows[:, 0], 1).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_qwen3_and_gpt2(tmp_path: Path):
    config = ModelConfig(**SIZES, qk_norm=True, head_dim=16, tie_embeddings=True)
    (tmp_path / "qwen3").mkdir()
    model, reader, _ = written(tmp_path / "qwen3", config)
    found = tensors(reader)
    assert "output.weight" not in found
    assert found["blk.0.attn_q.weight"].equal(model.params["blocks.0.attn.wq"])  # this architecture rotates halves, as we do
    assert found["blk.0.attn_k_norm.weight"].equal(model.params["blocks.0.attn.k_norm.w"])
    assert value(reader, "qwen3.attention.key_length") == 16

    (tmp_path / "gpt2").mkdir()
    model, reader, _ = written(tmp_path / "gpt2", ModelConfig(**SIZES, **GPT2))
    found = tensors(reader)
    fused = torch.cat([model.params[f"blocks.1.attn.w{x}"] for x in "qkv"])
    assert found["blk.1.attn_qkv.weight"].equal(fused)
    assert found["position_embd.weight"].equal(model.params["pos.w"])
    assert found["blk.0.attn_norm.bias"].equal(model.params["blocks.0.attn_norm.b"])
    assert value(reader, "gpt2.attention.layer_norm_epsilon") == pytest.approx(1e-5)
    assert "gpt2.rope.freq_base" not in reader.fields


@pytest.mark.parametrize(
    ("dtype", "kind", "bound"), [("float16", "F16", 1e-3), ("bfloat16", "BF16", 8e-3), ("q8_0", "Q8_0", 1e-2)]
)
def test_narrower_types(dtype: str, kind: str, bound: float, tmp_path: Path):
    model, reader, notes = written(tmp_path, ModelConfig(**SIZES, **GPT2), dtype=dtype)
    kinds = {t.name: t.tensor_type.name for t in reader.tensors}
    assert kinds["token_embd.weight"] == kind
    assert kinds["output_norm.weight"] == kinds["blk.0.attn_qkv.bias"] == kinds["position_embd.weight"] == "F32"
    up, ours = tensors(reader)["blk.0.ffn_up.weight"], model.params["blocks.0.ffn.w_up"]
    assert 0 < (up - ours).abs().max() / ours.abs().max() < bound
    if kind == "Q8_0":  # rows of 48 are not whole blocks
        assert kinds["blk.0.ffn_down.weight"] == "F16"
        assert any("2 matrices are float16, since their rows are not a multiple of 32" in note for note in notes)


def test_tokens_and_merges(tmp_path: Path):
    _, reader, _ = written(tmp_path, ModelConfig(**SIZES))
    texts = value(reader, "tokenizer.ggml.tokens")
    vocab = BPE.spec["model"]["vocab"]
    assert {text: i for i, text in enumerate(texts[:277])} == vocab
    assert texts[277:280] == list(SPECIAL)
    assert texts[280] == "<|end 280|>"  # a model without an end of its own
    kinds = value(reader, "tokenizer.ggml.token_type")
    assert set(kinds[:277]) == {int(gguf.TokenType.NORMAL)}
    assert set(kinds[277:]) == {int(gguf.TokenType.CONTROL)}
    merges = value(reader, "tokenizer.ggml.merges")
    assert len(merges) == len(BPE.spec["model"]["merges"])
    assert all("".join(merge.split(" ")) in vocab for merge in merges)


def test_eos_takes_an_unused_id(tmp_path: Path):
    model, reader, notes = written(tmp_path, ModelConfig(**SIZES), ByteTokenizer())
    assert value(reader, "tokenizer.ggml.eos_token_id") == 256
    assert tensors(reader)["token_embd.weight"].equal(model.params["embed.w"])  # no row was added
    assert value(reader, "tokenizer.ggml.tokens")[257] == "[unused 257]"
    assert value(reader, "tokenizer.ggml.token_type")[257] == int(gguf.TokenType.UNUSED)
    assert value(reader, "tokenizer.ggml.merges") == [UNREACHABLE_MERGE]
    assert any("24 ids of the vocabulary have no token" in note for note in notes)


def test_an_eos_of_the_model_is_kept():
    tokens = token_lists(BPE, Generation(eos_ids=(7,)), 280)
    assert tokens.eos_ids == [7]
    assert len(tokens.texts) == 280


def test_a_model_of_conversations(tmp_path: Path):
    config = ModelConfig(**SIZES)
    path, generation = tmp_path / "x.gguf", Generation(eos_ids=(279, 277), pad_id=277)
    assert export_gguf(path, config, model_of(config).params, BPE, generation, chat_template=CHATML) == []
    reader = gguf.GGUFReader(path)
    assert value(reader, "tokenizer.chat_template") == CHATML
    ends = [value(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    assert [value(reader, "tokenizer.ggml.tokens")[i] for i in ends] == ["<|im_end|>", "<|endoftext|>"]
    assert tensors(reader)["token_embd.weight"].shape[0] == 280


def test_the_added_row_is_never_the_most_likely():
    w, h = torch.randn(50, 8), torch.randn(1000, 8)
    logits = h @ with_mean_row(w).t()
    assert logits.argmax(-1).max() < 50
    assert logits.softmax(-1)[:, 50].max() <= 1 / 50


@pytest.mark.parametrize(
    ("config", "tokenizer", "says"),
    [
        (ModelConfig(**SIZES, ffn="geglu"), BPE, "architecture llama: ffn must be 'swiglu', got 'geglu'"),
        (ModelConfig(**SIZES, qk_norm=True, attn_bias=True), BPE, "architecture qwen3: attn_bias must be False, got True"),
        (ModelConfig(**SIZES, norm="layer"), BPE, "the nearest is LlamaForCausalLM, but there norm must be 'rms', got 'layer'"),
        (ModelConfig(**SIZES), TOKENIZER, r"supports byte-level BPE .* not this tokenizer \(char, WordLevel, Split\)"),
    ],
)
def test_what_llama_cpp_does_not_support(config: ModelConfig, tokenizer: Tokenizer, says: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=says):
        export_gguf(tmp_path / "x.gguf", config, model_of(config).params, tokenizer, Generation())
    assert list(tmp_path.iterdir()) == []


def test_other_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = ModelConfig(**SIZES)
    written(tmp_path, config)
    with pytest.raises(ConfigError, match="already exists"):
        export_gguf(tmp_path / "x.gguf", config, {}, BPE, Generation())
    with pytest.raises(ConfigError, match="has no dtype 'q4_k'"):
        export_gguf(tmp_path / "y.gguf", config, {}, BPE, Generation(), dtype="q4_k")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(MissingError, match=r"a GGUF export needs the package `gguf`: pip install 'tapeless\[gguf\]'"):
        export_gguf(tmp_path / "y.gguf", config, model_of(config).params, BPE, Generation())
