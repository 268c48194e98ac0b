"""Import of what transformers saves: same logits and gradients; unsupported settings in config.json are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from interop_fixtures import CASES, change_json, config_of, exported, model_of, tokens
from safetensors.torch import load_file, save_file

import tapeless
from tapeless.errors import ConfigError, InputError
from tapeless.interop.families import FAMILIES
from tapeless.interop.hf_import import read_model
from tapeless.verify.finding import distance
from tapeless.verify.hf_levels import run_hf, shifted_batch
from tapeless.verify.tolerances import HUGGING_FACE_FLOAT32


def saved_by_transformers(folder: Path, case: str, **options: Any) -> Any:
    """A model with random weights, created and saved by transformers."""
    transformers = pytest.importorskip("transformers")
    cls = getattr(transformers, CASES[case][0])
    torch.manual_seed(3)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    model = cls(
        cls.config_class(**FAMILIES[CASES[case][0]].settings(config_of(case)), **ids, attn_implementation="eager")
    ).eval()
    with torch.no_grad():
        for w in model.parameters():
            w.add_(torch.randn_like(w) * 0.2)
    model.loss_type = "ForCausalLM"
    model.save_pretrained(folder, **options)
    return model


@pytest.mark.parametrize("case", [case for case in CASES if case != "gpt2-relu2"])  # has dropout
def test_logits_and_every_gradient_of_what_transformers_saved(case: str, tmp_path: Path):
    theirs = saved_by_transformers(tmp_path / "saved", case)
    ours, data = tapeless.load(tmp_path / "saved"), shifted_batch()
    assert ours.config == config_of(case)
    truth = run_hf(theirs, data)
    assert (ours.logits(data.tokens) - truth.pop("logits")).abs().max() < 1e-4
    loss = ours.forward(data.tokens, data.targets)
    ours.backward()
    assert abs(loss - truth.pop("loss")) < 1e-5
    grads = FAMILIES[CASES[case][0]].from_hf(ours.config, truth.__getitem__)
    assert grads.keys() == ours.grads.keys()
    largest = max(float(dw.norm()) for dw in grads.values())
    for name, dw in grads.items():
        if dw.norm() > 1e-6 * largest:  # the key biases of a GPT-2 have no gradient but rounding
            assert distance(ours.grads[name], dw)[1] < HUGGING_FACE_FLOAT32, name


def test_shards_written_by_transformers(tmp_path: Path):
    theirs = saved_by_transformers(tmp_path / "saved", "llama", max_shard_size="6KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 2
    with torch.no_grad():
        assert (tapeless.load(tmp_path / "saved").logits(tokens()) - theirs(tokens()).logits).abs().max() < 1e-4


def rewritten(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


def test_old_files_without_prefix_and_with_constants(tmp_path: Path):
    """The first GPT-2 files: no `transformer.` before the names, and the causal mask among the weights."""
    folder, model = exported(tmp_path, "gpt2")
    mask = {f"h.{i}.attn.bias": torch.ones(1, 1, 9, 9, dtype=torch.bool) for i in range(2)}
    rewritten(folder, lambda old: {name.removeprefix("transformer."): w for name, w in old.items()} | mask)
    found = read_model(folder)
    assert all(found.params[name].equal(w) for name, w in model.params.items())
    assert any("2 tensors are constants of the code, such as transformer.h.0.attn.bias" in note for note in found.notes)


def test_a_tied_head_may_be_present_if_it_is_the_embedding(tmp_path: Path):
    folder, model = exported(tmp_path, "llama-tied-biases")
    rewritten(folder, lambda old: {**old, "lm_head.weight": old["model.embed_tokens.weight"].clone()})
    assert read_model(folder).params.keys() == model.params.keys()
    rewritten(folder, lambda old: {**old, "lm_head.weight": old["lm_head.weight"] + 1})
    with pytest.raises(InputError, match=r"lm_head\.weight differs from the embedding, although tie_word_embeddings is true"):
        read_model(folder)


def test_a_missing_head(tmp_path: Path):
    folder, _ = exported(tmp_path)
    rewritten(folder, lambda old: {name: w for name, w in old.items() if name != "lm_head.weight"})
    with pytest.raises(InputError, match=r"lm_head\.weight \(23, 24\) is missing, and tie_word_embeddings is not true"):
        read_model(folder)


def test_ids_outside_the_vocabulary_are_ignored_with_a_note(tmp_path: Path):
    folder, _ = exported(tmp_path)
    change_json(folder / "generation_config.json", eos_token_id=[3, 50256], bos_token_id="x", temperature=-1)
    found = read_model(folder)
    assert found.generation.eos_ids == (3,)
    assert found.generation.bos_id is None
    assert [note.split(" ")[0] for note in found.notes] == ["eos_token_id", "bos_token_id", "the"]


def test_old_files_have_the_ids_in_config_json(tmp_path: Path):
    folder, _ = exported(tmp_path)
    (folder / "generation_config.json").unlink()
    change_json(folder / "config.json", eos_token_id=5)
    assert read_model(folder).generation.eos_ids == (5,)


def test_keys_of_transformers_4(tmp_path: Path):
    folder, model = exported(tmp_path, "llama-odd")
    settings = json.loads((folder / "config.json").read_text())
    del settings["rope_parameters"], settings["dtype"]
    (folder / "config.json").write_text(json.dumps({**settings, "rope_scaling": None}))
    assert read_model(folder).config == model.config


LLAMA_REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"architectures": ["MistralForCausalLM"]},
        r"'MistralForCausalLM'.*; expected a list with one of GPT2LMHeadModel, Llama",
    ),
    ({"architectures": []}, "expected a list with one of"),
    ({"architectures": None}, "expected a list with one of"),
    ({"auto_map": {"AutoModel": "evil.py"}}, "auto_map asks to run code"),
    ({"quantization_config": {"bits": 4}}, "quantization_config means that the weights are quantized"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "only rope_type 'default' is supported"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "only rope_type 'default' is supported"),
    ({"rope_theta": 5.0}, "rope_theta is given twice with different values"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected one of silu, gelu_pytorch_tanh"),
    ({"hidden_act": ["silu"]}, "hidden_act is"),
    ({"hidden_size": "24"}, "hidden_dim must be int, got '24'"),
    ({"hidden_size": 0}, "hidden_dim must be at least 1, got 0"),
    ({"hidden_size": 10**30}, "below 2"),
    ({"num_hidden_layers": 2**62}, r"num_layers must be in \[1, 10000\), got 4611686018427387904"),
    ({"rms_norm_eps": -1}, "norm_eps must be above 0"),
    ({"layer_types": ["sliding_attention"]}, "only full_attention is supported"),
]


@pytest.mark.parametrize(("changes", "says"), LLAMA_REFUSED, ids=lambda value: str(value)[:40])
def test_unsupported_settings_are_refused(changes: dict[str, Any], says: str, tmp_path: Path):
    folder, _ = exported(tmp_path)
    change_json(folder / "config.json", **changes)
    with pytest.raises((InputError, ConfigError), match=says):
        read_model(folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True; only False"),
        ({"activation_function": "gelu"}, "activation_function is 'gelu'; expected one of gelu_new"),
        ({"n_head": 5}, "divisible by num_heads 5"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_unsupported_settings_of_gpt2(changes: dict[str, Any], says: str, tmp_path: Path):
    folder, _ = exported(tmp_path, "gpt2")
    change_json(folder / "config.json", **changes)
    with pytest.raises((InputError, ConfigError), match=says):
        read_model(folder)


def test_defaults_of_their_classes(tmp_path: Path):
    """An absent key has the default of their class."""
    folder, _ = exported(tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    for key in ("rms_norm_eps", "attention_bias", "mlp_bias", "hidden_act", "tie_word_embeddings", "head_dim"):
        del settings[key]
    (folder / "config.json").write_text(json.dumps(settings))
    found = read_model(folder).config
    assert (found.norm_eps, found.ffn, found.head_dim, found.tie_embeddings) == (1e-6, "swiglu", 6, False)
    del settings["hidden_size"]
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match="hidden_size is missing"):
        read_model(folder)


def test_dropout_gives_a_note(tmp_path: Path):
    folder, _ = exported(tmp_path, "gpt2-relu2")
    assert read_model(folder).config.dropout == 0.1
    change_json(folder / "config.json", embd_pdrop=0.2, attn_pdrop=0.3)
    found = read_model(folder)
    assert found.config.dropout == 0
    assert any("[0.1, 0.2, 0.3]: none is imported" in note for note in found.notes)


def test_a_directory_without_a_tokenizer(tmp_path: Path):
    folder, _ = exported(tmp_path)
    (folder / "tokenizer.json").unlink()
    assert read_model(folder).tokenizer is None


def test_load_accepts_a_directory(tmp_path: Path):
    folder, model = exported(tmp_path, "qwen3")
    assert tapeless.load(folder).store.flat.equal(model.store.flat)
    shutil.rmtree(folder)
    assert model_of(config_of("qwen3")).store.flat.equal(model.store.flat)


def test_chat_templates(tmp_path: Path):
    """A file of its own, a text in the tokenizer's configuration, or the default one of several there."""
    folder, _ = exported(tmp_path, chat_template="{{ 1 }}")
    config = folder / "tokenizer_config.json"
    assert read_model(folder).chat_template == json.loads(config.read_text())["chat_template"] == "{{ 1 }}"
    change_json(config, chat_template=[{"name": "tools", "template": "{{ 2 }}"}, {"name": "default", "template": "{{ 3 }}"}])
    assert read_model(folder).chat_template == "{{ 3 }}"
    (folder / "chat_template.jinja").write_text("{{ 4 }}")
    assert read_model(folder).chat_template == "{{ 4 }}"
    (folder / "chat_template.jinja").unlink()
    change_json(config, chat_template=None)
    assert read_model(folder)[-2:] == (None, [])


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% if %}", "the chat template is not valid Jinja"),
        (7, "is not a text"),
        ("x" * 300_000, "300,000 characters; at most"),
    ],
    ids=["broken", "number", "long"],
)
def test_a_chat_template_that_cannot_be_used(template: object, says: str, tmp_path: Path):
    """The model can, so it is a note."""
    folder, _ = exported(tmp_path)
    change_json(folder / "tokenizer_config.json", chat_template=template)
    found = read_model(folder)
    assert found.chat_template is None
    assert says in found.notes[0]
    assert found.notes[0].endswith("; it is ignored")
