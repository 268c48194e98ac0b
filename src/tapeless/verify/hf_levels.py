"""Level 3: the same weights in Hugging Face's transformers must give the same logits, loss and gradients.

This is the strongest check: independent code, differentiated by autograd. transformers is imported only when it is used."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.config import ModelConfig
from tapeless.interop.families import FAMILIES
from tapeless.interop.family import Family
from tapeless.model.transformer import Transformer
from tapeless.verify.finding import Finding, distance
from tapeless.verify.fixtures import ON_REFERENCE, Batch, ModelCase, Setting, T, batch, build, gradients, zero_by_identity
from tapeless.verify.model_judges import compared, rounding_floor
from tapeless.verify.oracles import Point
from tapeless.verify.tolerances import HUGGING_FACE, HUGGING_FACE_FLOAT32

BOUNDS = {"float64": HUGGING_FACE, "float32": HUGGING_FACE_FLOAT32}


class FamilyCase(NamedTuple):
    family: Family
    config: ModelConfig

    on: Setting = ON_REFERENCE

    @property
    def case(self) -> ModelCase:
        return ModelCase(self.family.name, self.config, on=self.on)


def family_cases() -> list[FamilyCase]:
    return [FamilyCase(family, config) for family in FAMILIES.values() for config in family.examples]


def missing() -> str | None:
    """Why level 3 cannot run, if it cannot."""
    return None if find_spec("transformers") else "transformers is not installed; pip install 'transformers>=4.56'"


def level_3() -> Iterator[Finding]:
    if missing() is None:
        for case in family_cases():
            for dtype in BOUNDS:
                yield from check_family(case, dtype)


def check_family(case: FamilyCase, dtype: str) -> Iterator[Finding]:
    ours, data = build(case.case, dtype), shifted_batch()
    assert isinstance(ours, Transformer)
    truth = run_hf(hf_model(case.family, case.config, ours.params, dtype), data)
    data = data.to(ours.device)
    claimed = {"logits": ours.logits(data.tokens), "loss": ours.loss(data.tokens, data.targets)}
    for name, value in claimed.items():
        _, error, where = distance(value, truth.pop(name))
        yield Finding("L3", check_name(case, dtype), "Hugging Face", name, error, BOUNDS[dtype], where)
    yield from by_hugging_face(case, dtype, gradients(ours, data), truth)


def by_hugging_face(case: FamilyCase, dtype: str, claimed: Point, theirs: Point) -> Iterator[Finding]:
    """Every gradient; `theirs` under their names."""
    truth = case.family.from_hf(case.config, theirs.__getitem__)
    check, zeros, floor = check_name(case, dtype), zero_by_identity(case.config, T), rounding_floor(dtype)
    yield from compared("L3", check, "Hugging Face", claimed, truth, BOUNDS[dtype], zeros=zeros, floor=floor)


def check_name(case: FamilyCase, dtype: str) -> str:
    head = "tied" if case.config.tie_embeddings else "untied"
    return f"model[{case.family.name}, {head}, {dtype}]"


def shifted_batch() -> Batch:
    """Their labels are the tokens themselves and the last has no successor, so its target is ignored here too."""
    tokens, targets = batch()
    targets[:, -1] = -100
    return Batch(tokens, targets)


def hf_model(family: Family, config: ModelConfig, params: Point, dtype: str, *, attention: str = "eager") -> Any:
    """Their class with our weights. attention: which of their implementations; eager is plain torch."""
    import transformers

    cls = getattr(transformers, family.name)
    settings = cls.config_class(
        **family.settings(config),
        attn_implementation=attention,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = cls(settings).to(getattr(torch, dtype)).eval()
    absent, unexpected = model.load_state_dict(family.to_hf(config, params), strict=False)
    expected_absent = [family.head] if config.tie_embeddings else []
    assert (absent, unexpected) == (expected_absent, []), f"absent {absent}, unexpected {unexpected}"
    model.tie_weights()
    model.loss_type = "ForCausalLM"  # transformers cannot infer it from the name of GPT-2's class, and would warn
    return model


def run_hf(model: Any, data: Batch) -> dict[str, Tensor]:
    """Logits, loss, and every gradient under their names; their loss shifts the labels itself."""
    labels = torch.cat([torch.full_like(data.targets[:, :1], -100), data.targets[:, :-1]], 1)
    with torch.enable_grad():
        out = model(input_ids=data.tokens, labels=labels)
        out.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"logits": out.logits.detach(), "loss": out.loss.detach(), **grads}
