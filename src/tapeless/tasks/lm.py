"""The model of a run as lm-eval's `tapeless`: what it answers to scores of continuations, of whole texts, and to prompts.

    lm_eval.simple_evaluate(model=TapelessLM("runs/tiny", weights="ema"), tasks=["capitals"])
    tapeless lm-eval runs/tiny --weights ema --tasks capitals            the same, by lm-eval's own command line
Texts become tokens as lm-eval's model of transformers (`hf`) makes them, so that an exported run has the same numbers there.
Importing this file needs the package lm_eval, and registers the model with it.
Tested by: tests/tasks/test_lm.py."""

import logging
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tapeless.config import Sampling, nearest, require
from tapeless.errors import ConfigError, InputError, MissingError
from tapeless.generate.engine import generate_each
from tapeless.tasks.scoring import Batches, Score, score
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
NEW_TOKENS = 256  # of a text, where its task says nothing: lm-eval's own number
SAMPLED = {field.name for field in fields(Sampling)}


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
        """checkpoint: latest, best, or a step. weights: raw or ema. batch_size: rows of a forward. device,
        dtype, ops, threads: as for tapeless.load. max_length: tokens that the model sees at once, by default all it can.
        prefix_token_id: the token that a text begins behind, by default the run's own, or a line end where it has none."""
        super().__init__()
        path = Path(str(run))  # lm-eval makes a number of a name that looks like one
        settings: dict[str, Any] = {"device": device, "dtype": dtype, "ops": ops, "threads": threads}
        found = load(path, which=str(checkpoint), weights=weights, **settings, fallback=fallback, on_warning=log.warning)
        self.model, self.data = found.model, found.data
        self.generation = generation_of(RunDir.open(path))
        self._device = self.model.device
        self.batch_size = _row_count(batch_size)
        longest = getattr(found.config.model, "max_seq_len", None)
        self.max_length: int = max_length or longest or found.config.train.seq_len or 1
        require(1 <= self.max_length <= (longest or self.max_length), "max_length", f"1 to {longest}", self.max_length)
        self._prefix = self._beginning() if prefix_token_id is None else prefix_token_id
        V = self.model.config.vocab_size
        require(0 <= self._prefix < V, "prefix_token_id", f"0 to {V - 1}", self._prefix)

    @property
    def prefix_token_id(self) -> int:
        return self._prefix

    @property
    def eot_token_id(self) -> int:
        return next(iter(self.generation.stop), self._prefix)

    @property
    def tokenizer_name(self) -> str:
        return f"{NAME}-{self.data.tokenizer.fingerprint}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """add_special_tokens: whether what the tokenizer puts in front of a text comes along; by default where it is not
        there already."""
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
            if texts[-1] and not continuation:  # an answer that nothing is left of would be certain, and win
                raise InputError(
                    f"{texts[-1]!r:.80} has no token of its own behind {texts[0][-20:]!r}: together they are tokens of the "
                    "context; begin it at a word, or with a space (target_delimiter)"
                )
        track: Any = partial(tqdm, desc="scoring", unit="batch", disable=disable_tqdm)
        # lm-eval counts spaces at the end of a context to the continuation, which may leave nothing of the context
        pairs = [(context or [self._prefix], continuation) for _texts, context, continuation in requests]
        return score(self.model, pairs, length=self.max_length, batch_size=self.batch_size, track=track)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy texts share a forward where their prompts have one length. A drawn text goes alone, by the number of its
        request: it is the same whatever the batch size."""
        wanted = [self._wanted(*request.args) for request in requests]
        texts = [""] * len(requests)
        for batch in tqdm(_batches(wanted, self.batch_size), desc="generating", unit="batch", disable=disable_tqdm):
            for i, text in zip(batch, self._generate([wanted[i] for i in batch], batch[0]), strict=True):
                texts[i] = text
        return texts

    def _wanted(self, context: str, settings: dict[str, Any]) -> "_Wanted":
        values = normalize_gen_kwargs(settings, NEW_TOKENS)
        until, new_tokens, drawn = values.pop("until"), values.pop("max_gen_toks"), values.pop("do_sample", False)
        for name in values:
            if name not in SAMPLED:
                raise ConfigError(f"generation_kwargs: unknown key {name}; {nearest(name, SAMPLED)}")
        values["temperature"] = float(values.get("temperature", 1.0)) if drawn else 0.0
        prompt = self.tok_encode(context) or [self._prefix]
        if new_tokens < self.max_length:  # the prompt loses its beginning, so that all of the new text sees the rest
            prompt = prompt[-(self.max_length - new_tokens) :]
        return _Wanted(prompt, until, new_tokens, Sampling(**values))

    def _generate(self, wanted: "list[_Wanted]", first: int) -> list[str]:
        tokenizer, one = self.data.tokenizer, wanted[0]
        texts = [UntilText(tokenizer, one.until) for _ in wanted]
        generate_each(
            self.model,
            [each.prompt for each in wanted],
            max_tokens=one.new_tokens,
            sampling=one.sampling,
            first_sample=first,
            vocab_size=tokenizer.vocab_size,
            stop=self.generation.stop,
            on_token=lambda sample, token: texts[sample - first].push(token),
            on_warning=log.warning,
        )
        return [text.finish() for text in texts]

    def _beginning(self) -> int:
        """A run that was trained here knows no token that begins a text, but texts follow line ends."""
        known = [i for i in (self.generation.begin, *self.generation.stop) if i is not None]
        if known:
            return known[0]
        try:
            (line_end,) = self.data.tokenizer.encode("\n").tolist()
        except ValueError:  # not one token, or none that a tokenizer of characters has seen
            raise InputError(
                "no token begins a text of this run, and its tokenizer has none for a line end; name one: prefix_token_id=N"
            ) from None
        log.warning("no token begins a text of this run: the first is predicted from a line end, id %d", line_end)
        return line_end


class _Wanted(NamedTuple):
    prompt: list[int]
    until: list[str]
    new_tokens: int
    sampling: Sampling

    def alike(self) -> tuple[Any, ...]:
        """What texts that are generated together have in common."""
        return len(self.prompt), tuple(self.until), self.new_tokens, self.sampling


def _batches(wanted: list[_Wanted], size: int) -> Batches:
    groups: dict[Any, list[int]] = {}
    for i, one in enumerate(wanted):
        groups.setdefault(one.alike() if one.sampling.temperature == 0 else i, []).append(i)
    return [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]


def _row_count(batch_size: int | str) -> int:
    if not str(batch_size).isdigit() or int(batch_size) < 1:
        raise ConfigError(f"batch_size {batch_size!r}: expected a number, from 1; nothing is tried out here")
    return int(batch_size)
