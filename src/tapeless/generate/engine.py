"""The generation loop: one forward per token, all samples in one batch.

A model with a kv_cache processes each token once. Beyond max_seq_len the window slides by half its length at a time: the cache
is cleared and the last half window processed again, which costs one more token per token on average; sliding by one would cost
a whole window per token. The start of the window depends only on the position, so text generated in two calls equals text
generated in one.
A model without attention (SimpleLM) has no max_seq_len and no kv_cache: its window is the last token.
Tested by: tests/generate/test_engine.py."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tapeless.config import Sampling, require
from tapeless.errors import InputError
from tapeless.generate.sampler import sample


class LanguageModel(Protocol):
    """What generation needs of a model. `kv_cache(batch_size, capacity)` is used if the model has it."""

    config: Any
    device: torch.device

    def logits(self, tokens: Tensor) -> Tensor: ...


class Generates:
    """A model's method `generate`. tapeless.load sets the tokenizer, and the ids that end a text."""

    tokenizer: Any = None
    eos_ids: Collection[int] = ()

    def generate(self, prompt: str | Iterable[int], *, max_tokens: int, sampling: Sampling | None = None) -> Any:
        """The prompt and its continuation: as text if the prompt is one, else as a list of token ids."""
        if isinstance(prompt, str) and self.tokenizer is None:
            raise InputError("this model has no tokenizer, so it cannot continue a text; pass token ids")
        model: Any = self
        ids = [int(i) for i in (self.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt)]
        V = self.tokenizer.vocab_size if self.tokenizer else None
        ids += generate(model, ids, max_tokens=max_tokens, sampling=sampling, vocab_size=V, stop=self.eos_ids)[0]
        return self.tokenizer.decode(ids) if isinstance(prompt, str) else ids


class _Reader:
    """Logits after each position of a growing batch of texts; only tokens that are not in the cache are processed."""

    def __init__(self, model: LanguageModel, batch_size: int, longest: int, on_warning: Callable[[str], None] | None):
        self.model, self.on_warning = model, on_warning
        self.limit: int | None = getattr(model.config, "max_seq_len", None)
        self.window = self.limit or 1
        self.start = 0
        make_cache = getattr(model, "kv_cache", None)
        self.kv_cache = make_cache(batch_size, min(self.window, longest)) if make_cache else None

    def logits(
        self,
        tokens: Tensor,  # (B, n) int64: the whole texts
    ) -> Tensor:  # (B, V)
        start = window_start(tokens.shape[1], self.window)
        if start and self.limit and self.on_warning:
            self.on_warning(
                f"the text is longer than max_seq_len = {self.limit}: the window slides, so the model sees the last "
                f"{self.window - window_hop(self.window) + 1} to {self.window} tokens"
            )
            self.on_warning = None
        if self.kv_cache is None:
            return self.model.logits(tokens[:, start:])[:, -1]
        if start != self.start:
            self.start, self.kv_cache.length = start, 0
        new = tokens[:, start + self.kv_cache.length :]
        return self.model.logits(new, kv_cache=self.kv_cache)[:, -1]  # type: ignore[call-arg]


def window_hop(window: int) -> int:
    return max(1, window // 2)


def window_start(length: int, window: int) -> int:
    """The start of the window for a text of this length: 0, then multiples of half a window."""
    hop = window_hop(window)
    return max(0, -(-(length - window) // hop) * hop)


def generate(model: LanguageModel, prompt_ids: Iterable[int], *, num_samples: int = 1, **options: Any) -> list[list[int]]:
    """The new tokens of each sample of one prompt, without the prompt. options: those of generate_each."""
    require(num_samples >= 1, "num_samples", "at least 1", num_samples)
    return generate_each(model, [[int(i) for i in prompt_ids]] * num_samples, **options)


def generate_each(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling | None = None,
    first_sample: int = 0,
    vocab_size: int | None = None,
    stop: Collection[int] = (),
    on_token: Callable[[int, int], bool | None] | None = None,
    on_warning: Callable[[str], None] | None = None,
) -> list[list[int]]:
    """The new tokens after each of several prompts of equal length, without the prompts.

    sampling: by default the model's own distribution. first_sample: the index of the first sample; sample i does not depend on
    the other samples of the batch. vocab_size: only ids below it are sampled, for a model with more ids than its tokenizer.
    stop: ids that end a sample; they are neither returned nor passed to on_token. on_token(sample index, id): called for each
    new token; returning True ends the sample after it. on_warning: called once when the window slides."""
    sampling = sampling or Sampling()
    if len({len(prompt) for prompt in prompts}) > 1:
        raise InputError("prompts of one batch must have equal length; group them by length")
    prompt = torch.tensor([list(prompt) for prompt in prompts], dtype=torch.int64, device=model.device)  # (B, n)
    if prompt.numel() == 0:
        raise InputError("the prompt is empty; generation needs at least one token")
    require(max_tokens >= 0, "max_tokens", "0 or more", max_tokens)
    V = model.config.vocab_size if vocab_size is None else vocab_size
    require(1 <= V <= model.config.vocab_size, "vocab_size", f"between 1 and the model's {model.config.vocab_size}", V)
    B, n = prompt.shape
    end = n + max_tokens
    text = torch.empty(B, end, dtype=torch.int64, device=model.device)  # (B, end), filled from the left
    text[:, :n] = prompt
    reader = _Reader(model, B, end, on_warning)
    samples: list[list[int]] = [[] for _ in range(B)]
    running = set(range(B))
    for position in range(n, end):
        so_far = text[:, :position]
        logits = reader.logits(so_far)  # (B, V)
        if model.config.vocab_size > V:
            logits = logits.index_fill(-1, torch.arange(V, model.config.vocab_size, device=model.device), -torch.inf)
        text[:, position] = sampled = sample(logits, so_far, sampling, position=position, first_sample=first_sample)
        for row, token in enumerate(sampled.tolist()):
            if token in stop:
                running.discard(row)
            elif row in running:
                samples[row].append(token)
                if on_token and on_token(first_sample + row, token):
                    running.discard(row)
        if not running:
            break
    return samples
