"""Level 3: the same weights in Hugging Face's transformers must give the same logits, loss and gradients.

The strongest witness there is: code of other people, differentiated by other means. It is imported only when asked for."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.config import ModelConfig
from tapeless.interop.families import their_settings
from tapeless.interop.names import from_hugging_face, to_hugging_face
from tapeless.model.transformer import Transformer
from tapeless.verify.finding import Finding, distance
from tapeless.verify.fixtures import ON_REFERENCE, Batch, ModelCase, Setting, T, batch, build, gradients, zero_by_identity
from tapeless.verify.model_judges import compared, rounding_floor
from tapeless.verify.oracles import Point
from tapeless.verify.tolerances import HUGGING_FACE, HUGGING_FACE_FLOAT32

BOUNDS = {"float64": HUGGING_FACE, "float32": HUGGING_FACE_FLOAT32}
_SIZES: dict[str, Any] = {"vocab_size": 23, "num_layers": 2, "num_heads": 4, "max_seq_len": 9, "intermediate_dim": 13}
_GPT2: dict[str, Any] = {
    "norm": "layer",
    "norm_bias": True,
    "position": "learned",
    "ffn": "gelu",
    "attn_bias": True,
    "ffn_bias": True,
}


class Family(NamedTuple):
    name: str  # of their class
    config: ModelConfig

    on: Setting = ON_REFERENCE

    @property
    def case(self) -> ModelCase:
        return ModelCase(self.name, self.config, on=self.on)


FAMILIES = [
    Family("LlamaForCausalLM", ModelConfig(hidden_dim=24, num_kv_heads=2, norm_eps=1e-4, **_SIZES)),
    Family("LlamaForCausalLM", ModelConfig(hidden_dim=24, attn_bias=True, ffn_bias=True, tie_embeddings=True, **_SIZES)),
    Family("Qwen3ForCausalLM", ModelConfig(hidden_dim=22, num_kv_heads=2, head_dim=6, qk_norm=True, rope_theta=1e3, **_SIZES)),
    Family("GPT2LMHeadModel", ModelConfig(hidden_dim=24, tie_embeddings=True, **_GPT2, **_SIZES)),
]


def missing() -> str | None:
    """Why level 3 cannot run, if it cannot."""
    return None if find_spec("transformers") else "transformers is not installed; pip install 'transformers>=4.56'"


def level_3() -> Iterator[Finding]:
    if missing() is None:
        for family in FAMILIES:
            for dtype in BOUNDS:
                yield from check_family(family, dtype)


def check_family(family: Family, dtype: str) -> Iterator[Finding]:
    ours, data = build(family.case, dtype), shifted_batch()
    assert isinstance(ours, Transformer)
    truth = run_theirs(their_model(family, ours.params, dtype), data)
    data = data.to(ours.device)
    claimed = {"logits": ours.logits(data.tokens), "loss": ours.loss(data.tokens, data.targets)}
    for name, value in claimed.items():
        _, error, where = distance(value, truth.pop(name))
        yield Finding("L3", check_name(family, dtype), "Hugging Face", name, error, BOUNDS[dtype], where)
    yield from by_hugging_face(family, dtype, gradients(ours, data), truth)


def by_hugging_face(family: Family, dtype: str, claimed: Point, theirs: Point) -> Iterator[Finding]:
    """Every gradient; `theirs` under their names."""
    truth = from_hugging_face(family.name, family.config, theirs)
    check, zeros, floor = check_name(family, dtype), zero_by_identity(family.config, T), rounding_floor(dtype)
    yield from compared("L3", check, "Hugging Face", claimed, truth, BOUNDS[dtype], zeros=zeros, floor=floor)


def check_name(family: Family, dtype: str) -> str:
    head = "tied" if family.config.tie_embeddings else "untied"
    return f"model[{family.name}, {head}, {dtype}]"


def shifted_batch() -> Batch:
    """Their labels are the tokens themselves and the last has no successor, so its target is ignored here too."""
    tokens, targets = batch()
    targets[:, -1] = -100
    return Batch(tokens, targets)


def their_model(family: Family, params: Point, dtype: str, *, attention: str = "eager") -> Any:
    """Their class with our weights. attention: which implementation of theirs; eager is the plain one."""
    import transformers

    cls = getattr(transformers, family.name)
    config = cls.config_class(
        **their_settings(family.name, family.config),
        attn_implementation=attention,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = cls(config).to(getattr(torch, dtype)).eval()
    weights = to_hugging_face(family.name, family.config, params)
    absent, unexpected = model.load_state_dict(weights, strict=False)
    expected_absent = ["lm_head.weight"] if family.config.tie_embeddings else []
    assert (absent, unexpected) == (expected_absent, []), f"absent {absent}, unexpected {unexpected}"
    model.tie_weights()
    model.loss_type = "ForCausalLM"  # the name of GPT-2's class does not say it, and transformers would warn
    return model


def run_theirs(model: Any, data: Batch) -> dict[str, Tensor]:
    """Logits and loss, and every gradient under its own name; their loss shifts the labels itself."""
    labels = torch.cat([torch.full_like(data.targets[:, :1], -100), data.targets[:, :-1]], 1)
    with torch.enable_grad():
        out = model(input_ids=data.tokens, labels=labels)
        out.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"logits": out.logits.detach(), "loss": out.loss.detach(), **grads}
