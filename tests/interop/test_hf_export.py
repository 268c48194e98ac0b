"""transformers loads an export: the same logits, the same token ids, and the same bits back."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from interop_fixtures import CASES, TOKENIZER, config_of, exported, model_of, tokens
from safetensors import safe_open

from tapeless.config import ModelConfig, Sampling, SimpleLMConfig
from tapeless.data.tokenizer import ByteTokenizer
from tapeless.errors import ConfigError, InputError
from tapeless.interop.generation import Generation
from tapeless.interop.hf_export import export_hugging_face
from tapeless.interop.hf_import import read_model

LARGEST_DIFFERENCE = 1e-4  # of a logit, in float32


def theirs(folder: Path):
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_the_same_logits(case: str, tmp_path: Path):
    folder, model = exported(tmp_path, case)
    loaded = theirs(folder)
    assert type(loaded).__name__ == CASES[case][0]
    with torch.no_grad():
        difference = (loaded(tokens()).logits - model.logits(tokens())).abs().max()
    assert difference < LARGEST_DIFFERENCE
    assert model.logits(tokens()).abs().max() > 0.5  # so that the bound means something


@pytest.mark.parametrize("case", CASES)
def test_import_gives_the_same_bits(case: str, tmp_path: Path):
    folder, model = exported(tmp_path, case)
    back = read_model(folder)
    assert (back.family.name, back.config) == (CASES[case][0], model.config)
    assert back.params.keys() == model.params.keys()
    assert all(back.params[name].equal(w) for name, w in model.params.items())
    assert back.tokenizer.fingerprint == TOKENIZER.fingerprint


def test_shards_hold_the_same_as_one_file(tmp_path: Path):
    folder, model = exported(tmp_path, "llama", shard_bytes=6000)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    assert len(shards) >= 3
    assert not (folder / "model.safetensors").exists()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * model.num_params
    assert set(index["weight_map"].values()) == {path.name for path in shards}
    with safe_open(shards[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}
    with torch.no_grad():
        assert (theirs(folder)(tokens()).logits - model.logits(tokens())).abs().max() < LARGEST_DIFFERENCE
    assert all(read_model(folder).params[name].equal(w) for name, w in model.params.items())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrower_dtypes_round_once(dtype: str, tmp_path: Path):
    folder, model = exported(tmp_path, dtype=dtype)
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    back = read_model(folder)
    assert all(back.params[name].equal(w.to(getattr(torch, dtype)).float()) for name, w in model.params.items())
    assert theirs(folder).dtype == getattr(torch, dtype)


def test_float16_refuses_values_outside_its_range(tmp_path: Path):
    model = model_of(config_of("llama"))
    model.params["blocks.1.attn.wq"][2, 3] = 1e6
    with pytest.raises(
        InputError, match=r"model\.layers\.1\.self_attn\.q_proj\.weight has values that are not finite in float16"
    ):
        export_hugging_face(tmp_path / "out", model.config, model.params, TOKENIZER, Generation(), dtype="float16")
    assert list(tmp_path.iterdir()) == []


def test_config_json_has_old_and_new_keys(tmp_path: Path):
    settings = json.loads((exported(tmp_path, "llama-odd")[0] / "config.json").read_text())
    assert settings["dtype"] == settings["torch_dtype"] == "float32"
    assert settings["rope_theta"] == settings["rope_parameters"]["rope_theta"] == 5e5
    assert settings["tie_word_embeddings"] is False


def test_gpt2_without_biases_is_exported_with_zeros(tmp_path: Path):
    config = ModelConfig(vocab_size=23, hidden_dim=24, max_seq_len=9, norm="layer", position="learned", ffn="gelu")
    model = model_of(config)
    notes = export_hugging_face(tmp_path / "out", config, model.params, TOKENIZER, Generation())
    assert any("written as zeros" in note for note in notes)
    with torch.no_grad():
        assert (theirs(tmp_path / "out")(tokens()).logits - model.logits(tokens())).abs().max() < LARGEST_DIFFERENCE


def test_their_tokenizer_gives_our_ids(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    model = model_of(ModelConfig(vocab_size=300, hidden_dim=8, num_layers=1, num_heads=2, intermediate_dim=8))
    generation = Generation(eos_ids=(10,), bos_id=33, sampling=Sampling(temperature=0.5, top_k=7))
    export_hugging_face(tmp_path / "out", model.config, model.params, ByteTokenizer(), generation)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "Ein Öl, 日本 🙂\n\tx"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    wanted = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert (wanted.eos_token_id, wanted.bos_token_id, wanted.temperature, wanted.top_k) == (10, 33, 0.5, 7)
    assert wanted.suppress_tokens == list(range(256, 300))  # ids without a token are never sampled there either
    back = read_model(tmp_path / "out")
    assert back.generation == generation
    assert any("44 ids without a token" in note for note in back.notes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"norm": "layer", "norm_bias": True}, "the nearest is LlamaForCausalLM, but there norm must be 'rms', got 'layer'"),
        ({"qk_norm": True, "ffn_bias": True}, "the nearest is LlamaForCausalLM, but there qk_norm must be False, got True"),
        ({"ffn": "relu2"}, "the nearest is LlamaForCausalLM, but there ffn must be 'swiglu' or 'geglu', got 'relu2'"),
        ({"logit_softcap": 30.0}, "the nearest is LlamaForCausalLM, but there logit_softcap must be 0.0, got 30.0"),
        (
            {"norm": "layer", "position": "learned", "ffn": "gelu", "num_kv_heads": 2},
            "the nearest is GPT2LMHeadModel, but there num_kv_heads must be num_heads 4, got 2",
        ),
        (
            {"hidden_dim": 22, "head_dim": 6},
            "the nearest is LlamaForCausalLM, but there hidden_dim 22 must be divisible by num_heads 4",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_an_architecture_without_a_family_is_refused(changes: dict, says: str, tmp_path: Path):
    config = ModelConfig(**{"vocab_size": 23, **changes})
    with pytest.raises(ConfigError, match=f"no Hugging Face family has this architecture; {says}"):
        export_hugging_face(tmp_path / "out", config, {}, TOKENIZER, Generation())
    assert list(tmp_path.iterdir()) == []


def test_other_refusals(tmp_path: Path):
    with pytest.raises(ConfigError, match="a SimpleLM has no attention"):
        export_hugging_face(tmp_path / "out", SimpleLMConfig(), {}, TOKENIZER, Generation())
    folder, model = exported(tmp_path)
    with pytest.raises(ConfigError, match="already exists; choose another --out"):
        export_hugging_face(folder, model.config, model.params, TOKENIZER, Generation())
    with pytest.raises(ConfigError, match="has no dtype 'q8_0'"):
        export_hugging_face(tmp_path / "out", model.config, model.params, TOKENIZER, Generation(), dtype="q8_0")


def test_training_only_settings_give_notes(tmp_path: Path):
    model = model_of(ModelConfig(vocab_size=23, hidden_dim=8, num_layers=1, dropout=0.1, z_loss=1e-4))
    notes = export_hugging_face(tmp_path / "out", model.config, model.params, TOKENIZER, Generation())
    assert [note.split(" =")[0] for note in notes] == ["z_loss", "dropout"]
