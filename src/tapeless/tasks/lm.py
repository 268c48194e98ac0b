"""The model of a run as lm-eval's model `tapeless`: log-likelihoods of continuations and of whole texts, and generation.

    lm_eval.simple_evaluate(model=TapelessLM("runs/tiny", weights="ema"), tasks=["capitals"])
    tapeless lm-eval runs/tiny --weights ema --tasks capitals            the same with lm-eval's command line
Texts are tokenized as by lm-eval's model for transformers (`hf`), so that an exported run gets the same results there.
Importing this file requires the package lm_eval and registers the model with it.
Tested by: tests/tasks/test_lm.py."""

import logging
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tapeless.config import Sampling, nearest, require
from tapeless.errors import ConfigError, InputError, MissingError
from tapeless.generate.engine import Engine
from tapeless.tasks.scoring import Score, score
from tapeless.tasks.stops import UntilText
from tapeless.training.imported import generation_of
from tapeless.training.run_dir import RunDir
from tapeless.training.runs import load

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from tqdm import tqdm
except ImportError:
    raise MissingError("this needs EleutherAI's package lm_eval: pip install 'tapeless[lm-eval]'") from None

log = logging.getLogger("tapeless")
NAME = "tapeless"
MAX_NEW_TOKENS = 256  # if the task does not say: lm-eval's default
SAMPLING_KEYS = {field.name for field in fields(Sampling)}


@register_model(NAME)
class TapelessLM(TemplateLM):
    def __init__(
        self,
        run: str | Path,
        *,
        checkpoint: str | int = "latest",
        weights: str = "raw",
        fallback: bool = True,
        batch_size: int | str = 1,
        device: str | None = None,
        dtype: str | None = None,
        ops: str | None = None,
        threads: int | None = None,
        max_length: int | None = None,
        prefix_token_id: int | None = None,
    ):
        """checkpoint: latest, best, or a step. weights: raw or ema. batch_size: sequences per forward. device, dtype, ops,
        threads: as for tapeless.load. max_length: length of the context window, by default max_seq_len. prefix_token_id: the
        token before the first of a text, by default the run's bos or eos id, or a newline if it has none."""
        super().__init__()
        path = Path(str(run))  # lm-eval converts a name that looks like a number
        settings: dict[str, Any] = {"device": device, "dtype": dtype, "ops": ops, "threads": threads}
        found = load(path, which=str(checkpoint), weights=weights, **settings, fallback=fallback, on_warning=log.warning)
        self.model, self.data = found.model, found.data
        self.generation = generation_of(RunDir.open(path))
        self._device = self.model.device
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise ConfigError(f"batch_size {batch_size!r}: expected a positive integer; auto is not supported")
        self.batch_size = int(batch_size)
        longest = getattr(found.config.model, "max_seq_len", None)
        self.max_length: int = max_length or longest or found.config.train.seq_len or 1
        require(1 <= self.max_length <= (longest or self.max_length), "max_length", f"1 to {longest}", self.max_length)
        self._prefix = self._default_prefix() if prefix_token_id is None else prefix_token_id
        V = self.model.config.vocab_size
        require(0 <= self._prefix < V, "prefix_token_id", f"0 to {V - 1}", self._prefix)

    @property
    def prefix_token_id(self) -> int:
        return self._prefix

    @property
    def eot_token_id(self) -> int:
        return next(iter(self.generation.eos_ids), self._prefix)

    @property
    def tokenizer_name(self) -> str:
        return f"{NAME}-{self.data.tokenizer.fingerprint}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """add_special_tokens: whether to add the tokenizer's prefix; by default if the text does not start with it."""
        tokenizer = self.data.tokenizer
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(tokenizer.decode([self._prefix]))
        return (tokenizer.encode_prompt if add_special_tokens else tokenizer.encode)(string).tolist()

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        texts = [((text,), [self._prefix], self.tok_encode(text)) for (text,) in (request.args for request in requests)]
        return [logprob for logprob, _ in self._loglikelihood_tokens(texts, disable_tqdm=disable_tqdm)]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[Score]:
        for texts, _context, continuation in requests:
            if texts[-1] and not continuation:  # an empty continuation would have probability 1 and win
                raise InputError(
                    f"{texts[-1]!r:.80} has no token of its own after {texts[0][-20:]!r}: it merges into the last token of "
                    "the context; start it at a word boundary or with a space (target_delimiter)"
                )
        track: Any = partial(tqdm, desc="scoring", unit="batch", disable=disable_tqdm)
        # lm-eval moves trailing spaces of a context to the continuation, which may leave the context empty
        pairs = [(context or [self._prefix], continuation) for _texts, context, continuation in requests]
        return score(self.model, pairs, length=self.max_length, batch_size=self.batch_size, track=track)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """batch_size texts are generated at a time. A sampled text depends on the index of its request, so that neither the
        batch size nor the other requests change it."""
        tokenizer, parsed = self.data.tokenizer, [self._parse(*request.args) for request in requests]
        engine = Engine(
            self.model,
            slots=self.batch_size,
            capacity=max((len(each.prompt) + each.new_tokens for each in parsed), default=1),
            vocab_size=tokenizer.vocab_size,
            on_warning=log.warning,
        )
        texts = {}
        for i, (prompt, until, new_tokens, sampling) in enumerate(parsed):
            options: dict[str, Any] = {"max_tokens": new_tokens, "sampling": sampling, "stop": self.generation.eos_ids}
            texts[engine.submit(prompt, **options, sample=i)] = UntilText(tokenizer, until)
        with tqdm(total=len(texts), desc="generating", unit="text", disable=disable_tqdm) as progress:
            while engine.busy:
                for stream in engine.step():
                    if any(map(texts[stream].push, stream.take())):
                        stream.cancel()
                    progress.update(stream.finish_reason is not None)
        return [text.finish() for text in texts.values()]

    def _parse(self, context: str, settings: dict[str, Any]) -> "_Request":
        values = normalize_gen_kwargs(settings, MAX_NEW_TOKENS)
        until, new_tokens, sampled = values.pop("until"), values.pop("max_gen_toks"), values.pop("do_sample", False)
        for name in values:
            if name not in SAMPLING_KEYS:
                raise ConfigError(f"generation_kwargs: unknown key {name}; {nearest(name, SAMPLING_KEYS)}")
        values["temperature"] = float(values.get("temperature", 1.0)) if sampled else 0.0
        prompt = self.tok_encode(context) or [self._prefix]
        if new_tokens < self.max_length:  # truncate the prompt on the left, so that the window need not slide
            prompt = prompt[-(self.max_length - new_tokens) :]
        return _Request(prompt, until, new_tokens, Sampling(**values))

    def _default_prefix(self) -> int:
        """A run trained here has no bos token, but in its data texts follow newlines."""
        known = [i for i in (self.generation.bos_id, *self.generation.eos_ids) if i is not None]
        if known:
            return known[0]
        try:
            (newline,) = self.data.tokenizer.encode("\n").tolist()
        except ValueError:  # several tokens, or a character that the tokenizer does not have
            raise InputError("this run has no bos token, and its tokenizer has no newline; pass prefix_token_id=N") from None
        log.warning("this run has no bos token: the first token of a text is predicted from a newline, id %d", newline)
        return newline


class _Request(NamedTuple):
    prompt: list[int]
    until: list[str]
    new_tokens: int
    sampling: Sampling
