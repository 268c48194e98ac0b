"""The same shape in Hugging Face's transformers, where one of its classes has it; one more contender where it is installed."""

from typing import Any

import torch
from torch import Tensor, nn

from tapeless.bench.peer import language_loss
from tapeless.bench.task import Task
from tapeless.bench.weights import initial
from tapeless.config import AnyModelConfig, ModelConfig
from tapeless.errors import ConfigError, MissingError
from tapeless.interop.families import completed, family_of
from tapeless.verify.hf_levels import Family, missing, their_model


def same_family(config: AnyModelConfig) -> str:
    """The class of theirs that has this architecture and no parameter more; an error that says so where there is none."""
    try:
        name = family_of(config)
    except ConfigError as error:
        raise MissingError(f"transformers has no class of this architecture: {error}") from None
    assert isinstance(config, ModelConfig)
    if completed(name, config) != config:
        raise MissingError(f"transformers has no class of this architecture: {name} is never without biases")
    return name


def load_library(config: AnyModelConfig) -> None:
    """Import what the model will need: its class, whose module is loaded only when it is asked for."""
    reason = missing()
    if reason:
        raise MissingError(reason)
    import transformers

    getattr(transformers, same_family(config))


def build_hf(task: Task) -> Any:
    config, params = task.model, {name: make() for name, make in initial(task.model, task.train.seed).items()}
    assert isinstance(config, ModelConfig)
    model = their_model(Family(same_family(config), config), params, "float32", attention="sdpa")
    return model.to(task.train.device)


class HFLoss(nn.Module):
    """tokens, targets -> loss, by the loss of the peer: theirs would shift the targets itself and leave one out."""

    def __init__(self, model: Any, config: ModelConfig):
        super().__init__()
        self.model, self.config = model, config

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (B, T), (B, T) -> ()
        return language_loss(self.model(input_ids=tokens, use_cache=False).logits, targets, self.config)


class HFGeneration:
    """Greedy generation with their KV cache; weights in the dtype of the computation, as one would load them."""

    def __init__(self, task: Task):
        self.task = task
        self.model = build_hf(task).to(task.compute)
        self.prompt = torch.tensor([task.prompt()], device=task.train.device)  # (1, n)

    def prepare(self, step: int) -> None:
        """Every generation is the same."""

    def step(self) -> list[int]:
        n = self.task.new_tokens
        with torch.inference_mode():
            text = self.model.generate(
                self.prompt,
                attention_mask=torch.ones_like(self.prompt),
                max_new_tokens=n,
                min_new_tokens=n,
                do_sample=False,
                use_cache=True,
            )
        return text[0, self.prompt.shape[1] :].tolist()

    def parts(self) -> dict[str, int]:
        return {"parameters": sum(w.nbytes for w in self.model.parameters())}

    def facts(self) -> dict[str, Any]:
        return {}
