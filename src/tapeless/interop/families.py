"""Which of Hugging Face's families has a model's architecture, and its config.json, written and read by one table.

A family fixes some of our choices and leaves others open. A configuration that no family can express is refused with the
nearest one and what stands in the way; a config.json that asks for mathematics we do not have is refused too, by the key that
asks. What is only of training (dropout in a Llama, z-loss) does not change the function and is told in a note instead.
Tested by: tests/interop/test_families.py, tests/model/test_against_hf.py."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from tapeless.config import AnyModelConfig, ModelConfig, checked
from tapeless.errors import ConfigError, InputError

GATES = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}  # our name -> theirs
PLAIN = {"gelu": "gelu_new", "tanh": "tanh", "relu": "relu", "relu2": "relu2"}
SPELLINGS = {"swish": "silu", "gelu_pytorch_tanh": "gelu_new", "gelu_new": "gelu_pytorch_tanh"}  # of one function
REQUIRED = object()  # a key without a default


class Family(NamedTuple):
    model_type: str
    fixed: dict[str, Any]  # our fields that this family has no choice in
    activations: dict[str, str]
    activation_key: str
    fields: dict[str, tuple[str, Any]]  # their key -> our field, and what their class takes where the key is absent
    neutral: dict[str, tuple[Any, ...]]  # keys of theirs that change the function, and the values that leave it ours
    filled: tuple[str, ...] = ()  # our choices that may be off: theirs is on, with zeros


_ROTARY: dict[str, Any] = {"norm": "rms", "norm_placement": "pre", "position": "rope", "logit_softcap": 0.0}
_LLAMA_FIELDS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", REQUIRED),
    "hidden_size": ("hidden_dim", REQUIRED),
    "num_hidden_layers": ("num_layers", REQUIRED),
    "num_attention_heads": ("num_heads", REQUIRED),
    "num_key_value_heads": ("num_kv_heads", None),
    "head_dim": ("head_dim", None),
    "intermediate_size": ("intermediate_dim", REQUIRED),
    "max_position_embeddings": ("max_seq_len", 2048),
    "rms_norm_eps": ("norm_eps", 1e-6),
    "attention_bias": ("attn_bias", False),
    "tie_word_embeddings": ("tie_embeddings", False),
}
_QWEN3_DEFAULTS: dict[str, tuple[str, Any]] = {"head_dim": ("head_dim", 128), "max_position_embeddings": ("max_seq_len", 32768)}

FAMILIES = {
    "LlamaForCausalLM": Family(
        "llama",
        {**_ROTARY, "qk_norm": False},
        GATES,
        "hidden_act",
        {**_LLAMA_FIELDS, "mlp_bias": ("ffn_bias", False)},
        {},
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        {**_ROTARY, "qk_norm": True, "ffn_bias": False},
        GATES,
        "hidden_act",
        {**_LLAMA_FIELDS, **_QWEN3_DEFAULTS},
        {"use_sliding_window": (False, None)},
    ),
    "GPT2LMHeadModel": Family(
        "gpt2",
        {"norm": "layer", "norm_placement": "pre", "position": "learned", "qk_norm": False, "logit_softcap": 0.0},
        PLAIN,
        "activation_function",
        {
            "vocab_size": ("vocab_size", REQUIRED),
            "n_embd": ("hidden_dim", REQUIRED),
            "n_layer": ("num_layers", REQUIRED),
            "n_head": ("num_heads", REQUIRED),
            "n_inner": ("intermediate_dim", None),
            "n_positions": ("max_seq_len", REQUIRED),
            "layer_norm_epsilon": ("norm_eps", 1e-5),
            "tie_word_embeddings": ("tie_embeddings", True),
        },
        {"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
        ("norm_bias", "attn_bias", "ffn_bias"),
    ),
}
# Whatever the family: keys under which others have put mathematics of their own, or ask for code of theirs to be run.
REFUSED = {
    "auto_map": "asks to run code that lies beside the weights",
    "quantization_config": "says that the weights are quantized; save them as float32, float16 or bfloat16",
}


def misfits(name: str, config: ModelConfig) -> list[str]:
    """What keeps a family from expressing a model, in words; nothing where it can."""
    family = FAMILIES[name]
    found = [
        f"{field} is {getattr(config, field)!r}, there {value!r}"
        for field, value in family.fixed.items()
        if getattr(config, field) != value
    ]
    if config.ffn not in family.activations:
        found.append(f"ffn is {config.ffn!r}, there {' or '.join(map(repr, family.activations))}")
    if config.hidden_dim % config.num_heads and name != "Qwen3ForCausalLM":
        found.append(f"hidden_dim {config.hidden_dim} is not divisible by num_heads {config.num_heads}")
    if name == "GPT2LMHeadModel":
        if config.num_kv_heads != config.num_heads:
            found.append(f"num_kv_heads is {config.num_kv_heads}, there num_heads {config.num_heads}")
        if config.head_dim * config.num_heads != config.hidden_dim:
            found.append(f"head_dim is {config.head_dim}, there hidden_dim / num_heads")
    return found


def family_of(config: AnyModelConfig) -> str:
    """The class of theirs that has this architecture; an error that names the nearest where there is none."""
    if not isinstance(config, ModelConfig):
        raise ConfigError("a SimpleLM has no attention, and no Hugging Face family is without it; export a transformer")
    found = {name: misfits(name, config) for name in FAMILIES}
    name = min(found, key=lambda name: len(found[name]))
    if found[name]:
        raise ConfigError(f"no Hugging Face family has this architecture; nearest is {name}, but {'; '.join(found[name])}")
    return name


def completed(name: str, config: ModelConfig) -> ModelConfig:
    """The model with the biases that the family is never without; they are zeros where ours has none."""
    choices: dict[str, Any] = dict.fromkeys(FAMILIES[name].filled, True)
    return replace(config, **choices)


def their_settings(name: str, config: ModelConfig) -> dict[str, Any]:
    """What config.json says of the function itself."""
    family = FAMILIES[name]
    settings = {key: getattr(config, field) for key, (field, _) in family.fields.items()}
    settings |= {key: values[0] for key, values in family.neutral.items()}
    settings[family.activation_key] = family.activations[config.ffn]
    if config.position == "rope":
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if name == "GPT2LMHeadModel":
        settings |= {"resid_pdrop": config.dropout, "embd_pdrop": config.dropout, "attn_pdrop": 0.0}
    return settings


def training_notes(name: str, config: ModelConfig) -> list[str]:
    """What a model was trained with and the family has no word for."""
    fields = ["z_loss", "label_smoothing", *([] if name == "GPT2LMHeadModel" else ["dropout"])]
    return [
        f"{field} = {getattr(config, field)} is of training alone and not in the files"
        for field in fields
        if getattr(config, field)
    ]


class Described(NamedTuple):
    family: str
    config: ModelConfig
    notes: list[str]


def read_settings(settings: Mapping[str, Any], where: str) -> Described:
    """The family and the model that a config.json describes; an error where it asks for anything that ours is not."""
    name = _architecture(settings, where)
    family, notes = FAMILIES[name], list[str]()
    values: dict[str, Any] = {}
    for key, reason in REFUSED.items():
        if settings.get(key) is not None:
            raise InputError(f"{where}: {key} {reason}")
    for key, (field, default) in family.fields.items():
        value = settings.get(key, default)
        if default is REQUIRED and value in (REQUIRED, None):
            raise InputError(f"{where}: {key} is missing")
        if value is not None:
            values[field] = value
    for key, allowed in family.neutral.items():
        if key in settings and settings[key] not in allowed:
            raise InputError(f"{where}: {key} is {settings[key]!r}; only {allowed[0]!r} is the function of our models")
    values |= family.fixed | dict.fromkeys(family.filled, True)
    values["ffn"] = _activation(family, settings, where)
    if name == "GPT2LMHeadModel":
        values |= _gpt2_values(settings, values, notes)
    else:
        values["rope_theta"] = _rope_theta(settings, where)
        _check_layers(settings, where)
        if settings.get("attention_dropout"):
            notes.append(f"attention_dropout {settings['attention_dropout']} is of training alone and not taken over")
    config = checked("model", values, where)
    found = misfits(name, config)
    if found:
        raise InputError(f"{where}: not a {name} that its own class could build: {'; '.join(found)}")
    return Described(name, config, notes)


def _architecture(settings: Mapping[str, Any], where: str) -> str:
    names = settings.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise InputError(f"{where}: architectures must name one class, got {names!r:.80}; known are {', '.join(FAMILIES)}")
    if names[0] not in FAMILIES:
        raise InputError(f"{where}: unknown architecture {names[0]!r:.80}; known are {', '.join(FAMILIES)}")
    return names[0]


def _activation(family: Family, settings: Mapping[str, Any], where: str) -> str:
    ours = {theirs: field for field, theirs in family.activations.items()}
    theirs = settings.get(family.activation_key, next(iter(family.activations.values())))
    if isinstance(theirs, str):
        for spelling in (theirs, SPELLINGS.get(theirs)):
            if spelling in ours:
                return ours[spelling]
    raise InputError(f"{where}: {family.activation_key} is {theirs!r:.80}; expected one of {', '.join(ours)}")


def _rope_theta(settings: Mapping[str, Any], where: str) -> Any:
    """transformers 5 keeps it in rope_parameters, 4 beside the others; any scaling of the wavelengths is refused."""
    found = {}
    for key in ("rope_parameters", "rope_scaling"):
        table = settings.get(key)
        if table is None:
            continue
        if not isinstance(table, dict):
            raise InputError(f"{where}: {key} must be a table, got {table!r:.80}")
        kind = table.get("rope_type", table.get("type", "default"))
        if kind != "default" or table.get("partial_rotary_factor", 1) != 1:
            raise InputError(f"{where}: {key} is {table!r:.200}; only rope_type 'default' is known here")
        if "rope_theta" in table:
            found[key] = table["rope_theta"]
    if settings.get("rope_theta") is not None:
        found["rope_theta"] = settings["rope_theta"]
    values = list(found.values()) or [1e4]
    if any(value != values[0] for value in values):
        raise InputError(f"{where}: rope_theta stands there twice, and differs: {found}")
    return values[0]


def _check_layers(settings: Mapping[str, Any], where: str) -> None:
    kinds = settings.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)):
        raise InputError(f"{where}: layer_types is {kinds!r:.120}; only full_attention is known here")


def _gpt2_values(settings: Mapping[str, Any], values: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """n_inner is four times the width where it is not given. Of their three dropouts ours is the two that are one number."""
    width = values["hidden_dim"]
    drops = [settings.get(f"{name}_pdrop", 0.1) for name in ("resid", "embd", "attn")]
    more = {} if "intermediate_dim" in values or type(width) is not int else {"intermediate_dim": 4 * width}
    if drops[0] == drops[1]:
        more["dropout"] = drops[0]
    if drops[0] != drops[1] or drops[2]:
        taken = f"dropout is {drops[0]} here" if drops[0] == drops[1] else "none is taken over"
        notes.append(f"resid_pdrop, embd_pdrop and attn_pdrop are {drops}: {taken}, and attention has none")
    return more
