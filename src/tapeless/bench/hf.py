"""The same model in Hugging Face's transformers, as one more contender if it is installed and has the architecture."""

from typing import Any

import torch
from torch import Tensor, nn

from tapeless.bench.peer import language_loss
from tapeless.bench.task import Contender, Task
from tapeless.bench.weights import initial
from tapeless.config import AnyModelConfig, ModelConfig
from tapeless.errors import ConfigError, MissingError
from tapeless.interop.families import family_of
from tapeless.interop.family import Family
from tapeless.verify.hf_levels import hf_model, missing


def hf_family(config: AnyModelConfig) -> Family:
    """The family with exactly this architecture and these parameters; an error with the reason if there is none."""
    try:
        family = family_of(config)
    except ConfigError as error:
        raise MissingError(f"transformers has no class of this architecture: {error}") from None
    assert isinstance(config, ModelConfig)
    if family.completed(config) != config:
        raise MissingError(f"transformers has no class of this architecture: {family.name} always has biases")
    return family


def load_library(config: AnyModelConfig) -> None:
    """Import transformers and the module of the model's class, which transformers loads on first access."""
    reason = missing()
    if reason:
        raise MissingError(reason)
    import transformers

    getattr(transformers, hf_family(config).name)


def build_hf(task: Task) -> Any:
    config, params = task.model, {name: make() for name, make in initial(task.model, task.train.seed).items()}
    assert isinstance(config, ModelConfig)
    return hf_model(hf_family(config), config, params, "float32", attention="sdpa").to(task.train.device)


class HFLoss(nn.Module):
    """tokens, targets -> loss, with the loss of the torch baseline: theirs shifts the targets itself and drops one."""

    def __init__(self, model: Any, config: ModelConfig):
        super().__init__()
        self.model, self.config = model, config

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (B, T), (B, T) -> ()
        return language_loss(self.model(input_ids=tokens, use_cache=False).logits, targets, self.config)


class HFGeneration(Contender):
    """Greedy generation with their KV cache; weights in the compute dtype, as a user would load them."""

    def __init__(self, task: Task):
        self.task = task
        self.model = build_hf(task).to(task.compute)
        self.prompt = torch.tensor([task.prompt()], device=task.train.device)  # (1, n)

    def step(self) -> list[int]:
        n = self.task.new_tokens
        with torch.inference_mode():
            mask, greedy = torch.ones_like(self.prompt), {"do_sample": False, "use_cache": True}
            text = self.model.generate(self.prompt, attention_mask=mask, max_new_tokens=n, min_new_tokens=n, **greedy)
        return text[0, self.prompt.shape[1] :].tolist()

    def parts(self) -> dict[str, int]:
        return {"parameters": sum(w.nbytes for w in self.model.parameters())}
