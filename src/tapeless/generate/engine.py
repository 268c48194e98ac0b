"""The generation engine: sequences of different lengths that join and leave between steps, each in a slot of the kv_cache.

    engine = Engine(model, slots=8)
    stream = engine.submit(prompt_ids, max_tokens=100)
    for token in stream: …                                  # runs the engine as needed
    while engine.busy: for stream in engine.step(): …       # the same for many streams
A step starts what waits and fits, and runs every other sequence one token further. A request whose prompt begins like one that
a slot holds, of a running or an ended sequence, takes over its keys and values. None of this changes a token: it depends on the
text before it, the sampling and the index of the sample alone.
Weights may be written between sequences, never within one: what the slots hold of older weights is then not taken over.

Beyond max_seq_len the window slides by half its length at a time: its last half is processed again, which costs one more token
per token on average; sliding by one would cost a whole window per token. The start of the window depends only on the position,
so text generated in two calls equals text generated in one.
A model without attention (SimpleLM) has no max_seq_len and no kv_cache: its window is the last token.
Tested by: tests/generate/test_engine.py."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from numbers import Integral
from typing import Any, NamedTuple

from tapeless.config import Sampling, require
from tapeless.config.fields import require_type
from tapeless.errors import InputError, OrderError
from tapeless.generate.decoder import LanguageModel, Request, make_decoder

SLOTS = 32  # of generate: more prompts than this take turns


class Stream:
    """The new tokens of one sequence, as they are generated. Not for several threads, like the engine."""

    def __init__(self, engine: "Engine", number: int, prompt: list[int], request: Request):
        self.tokens: list[int] = []  # so far; without the prompt and the id that ended it
        self.finish_reason: str | None = None  # None | length | stop | cancelled
        self._engine, self._number, self._prompt, self._request = engine, number, prompt, request
        self._drawn = 0  # tokens asked of the decoder
        self._taken = 0  # tokens handed to the caller

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> int:
        while self._taken == len(self.tokens):
            if self.finish_reason:
                raise StopIteration
            self._engine.step()
        self._taken += 1
        return self.tokens[self._taken - 1]

    def take(self) -> list[int]:
        """The tokens that arrived since the last call, without waiting for more."""
        new = self.tokens[self._taken :]
        self._taken = len(self.tokens)
        return new

    def cancel(self) -> None:
        """End it now; its slot is free for the next step."""
        self._engine._cancel(self)


class _Slot(NamedTuple):
    """What a slot holds, also after its sequence ended."""

    stream: Stream
    first: int  # where the window starts in the text
    length: int  # of the window when it was started


class Engine:
    __doc__ = __doc__

    def __init__(
        self,
        model: LanguageModel,
        *,
        slots: int = 1,
        capacity: int | None = None,
        vocab_size: int | None = None,
        reuse_prefixes: bool = True,
        on_warning: Callable[[str], None] | None = None,
    ):
        """slots: sequences that run at once. capacity: tokens of the longest sequence with its prompt, by default max_seq_len;
        the kv_cache has slots x capacity tokens. vocab_size: only ids below it are sampled, for a model with more ids than its
        tokenizer. reuse_prefixes: whether a prompt takes over the keys and values of one that begins alike. on_warning: called
        once when a window slides."""
        require(slots >= 1, "slots", "at least 1", slots)
        V = model.config.vocab_size
        self._vocab_size = V if vocab_size is None else vocab_size
        require(1 <= self._vocab_size <= V, "vocab_size", f"between 1 and the model's {V}", self._vocab_size)
        self._limit: int | None = getattr(model.config, "max_seq_len", None)
        self._window = self._limit or 1
        self._model_vocab_size, self._on_warning = V, on_warning
        capacity = self._window if capacity is None else min(self._window, max(1, capacity))
        self._store, self._version = model.store, model.store.version
        self._decoder = make_decoder(model, slots, capacity)
        self._reuse = self._decoder.reuse if reuse_prefixes else 0
        self._submitted = 0
        self._failed = False  # a step did not come to its end: what the slots hold is unknown
        self._waiting: deque[Stream] = deque()
        self._running: dict[int, Stream] = {}  # by slot
        self._free = list(range(slots))  # the one that ended first comes first
        self._slots: dict[int, _Slot] = {}
        self._rounds: deque[tuple[int, dict[int, Stream]]] = deque()  # queued: how many results, and whose by slot

    def submit(
        self,
        prompt_ids: Iterable[int],
        *,
        max_tokens: int,
        sampling: Sampling | None = None,
        sample: int = 0,
        stop: Collection[int] = (),
    ) -> Stream:
        """Queue a request; requests start in this order, as slots become free. sampling: by default the model's own
        distribution. sample: its index: equal prompts with equal seeds differ by it. stop: ids that end it and are not
        returned."""
        prompt = [int(i) for i in prompt_ids]
        check_options(max_tokens, sampling, stop=stop)
        self._check(prompt, max_tokens)
        request = Request(sampling or Sampling(), sample, max_tokens, stop, self._vocab_size)
        stream = Stream(self, self._submitted, prompt, request)
        self._submitted += 1
        if max_tokens:
            self._waiting.append(stream)
        else:
            stream.finish_reason = "length"
        return stream

    @property
    def busy(self) -> bool:
        """Whether any stream is waiting or running."""
        return bool(self._waiting or self._running)

    def step(self) -> list[Stream]:
        """One more token of every running sequence, after waiting ones got the free slots. Returns the streams that have new
        tokens or ended, in the order of their submission. After an error in it an engine cannot go on."""
        if self._failed:
            raise OrderError("this engine stopped in the middle of a step; make a new one")
        self._notice_new_weights()
        self._failed = True
        changed = self._step()
        self._failed = False
        return changed

    def _notice_new_weights(self) -> None:
        if self._store.version == self._version:
            return
        if self._running:
            raise OrderError("parameters were written while a sequence was running; cancel it, or write them after its end")
        self._slots.clear()
        self._version = self._store.version

    def _step(self) -> list[Stream]:
        changed: set[Stream] = set()
        if any(map(self._must_slide, self._running)):
            self._read(0, changed)  # to run a window again, all of its tokens are needed
        sliding = [slot for slot in self._running if self._must_slide(slot)]
        queued = {self._start(self._running[slot], slot): self._running[slot] for slot in sliding}
        while self._waiting and self._free:
            stream = self._waiting.popleft()
            queued[self._start(stream)] = stream
        results = len(queued)
        further = [slot for slot, s in self._running.items() if slot not in queued and s._drawn < s._request.max_tokens]
        if further:
            self._decoder.advance(further)
            results += 1
            queued.update((slot, self._running[slot]) for slot in further)
        for stream in queued.values():
            stream._drawn += 1
        if queued:
            self._rounds.append((results, queued))
        self._read(self._decoder.lag if queued else 0, changed)
        return sorted(changed, key=lambda stream: stream._number)

    def _read(self, leave: int, changed: set[Stream]) -> None:
        """Deliver the tokens of the oldest rounds until `leave` are left."""
        while len(self._rounds) > leave:
            results, streams = self._rounds.popleft()
            for _ in range(results):
                for slot, token in self._decoder.collect():
                    stream = streams[slot]
                    if stream.finish_reason is None:  # else it ended after this token was queued
                        changed.add(stream)
                        self._deliver(slot, stream, token)

    def _deliver(self, slot: int, stream: Stream, token: int) -> None:
        if token in stream._request.stop:
            self._end(slot, "stop")
            return
        stream.tokens.append(token)
        if len(stream.tokens) == stream._request.max_tokens:
            self._end(slot, "length")

    def _end(self, slot: int, reason: str) -> None:
        self._running.pop(slot).finish_reason = reason
        self._free.append(slot)

    def _cancel(self, stream: Stream) -> None:
        if stream.finish_reason:
            return
        if stream in self._waiting:
            self._waiting.remove(stream)
            stream.finish_reason = "cancelled"
        else:
            self._end(next(slot for slot, running in self._running.items() if running is stream), "cancelled")

    def _must_slide(self, slot: int) -> bool:
        """Whether the next token of the sequence needs another window."""
        stream, first, _ = self._slots[slot]
        length = len(stream._prompt) + stream._drawn
        return length - first > self._window and stream._drawn < stream._request.max_tokens

    def _start(self, stream: Stream, slot: int | None = None) -> int:
        """Run the window of a sequence, in this slot or in a free one."""
        text = stream._prompt + stream.tokens
        first = window_start(len(text), self._window)
        if first and self._limit and self._on_warning:
            self._on_warning(
                f"the text is longer than max_seq_len = {self._limit}: the window slides, so the model sees the last "
                f"{self._window - window_hop(self._window) + 1} to {self._window} tokens"
            )
            self._on_warning = None
        source, reused = self._source(text[first:])
        if slot is None:
            slot = source if source in self._free else self._free[0]
            self._free.remove(slot)
            self._running[slot] = stream
        if reused and source != slot:
            self._decoder.copy_prefix(source, slot, reused)
        self._decoder.start(slot, stream._request, text, first, reused)
        self._slots[slot] = _Slot(stream, first, len(text) - first)
        return slot

    def _source(self, window: list[int]) -> tuple[int, int]:
        """The slot that holds most of the beginning of this window, a free one if there are several, and how much of it."""
        lengths = {slot: self._shared(held, window) for slot, held in self._slots.items()} if self._reuse else {}
        best = max(lengths, key=lambda slot: (lengths[slot], slot in self._free), default=-1)
        return (best, lengths[best]) if lengths.get(best) else (-1, 0)

    def _shared(self, held: _Slot, window: list[int]) -> int:
        """How many tokens of the window can be reused from a slot: those that were computed in the same passes."""
        stream, first, length = held
        text = (stream._prompt + stream.tokens)[first:]
        usable = text[: max(length, len(text) - 1)] if self._decoder.reuse_generated else text[:length]  # the last is not run
        if usable == window and len(window) == length:
            return length
        pairs = enumerate(zip(usable, window, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(usable), len(window)))
        return min(same, len(window) - 1) // self._reuse * self._reuse

    def _check(self, prompt: list[int], max_tokens: int) -> None:
        """Here, so that no request can fail in a step that it shares with others."""
        if not prompt:
            raise InputError("the prompt is empty; generation needs at least one token")
        V = self._model_vocab_size
        for position, token in enumerate(prompt):
            if not 0 <= token < V:
                raise InputError(f"prompt [{position}] is {token}, outside the vocabulary of {V} (0 to {V - 1})")
        need = min(self._window, len(prompt) + max_tokens)
        if need > self._decoder.capacity:
            raise InputError(f"a text of {need} tokens does not fit into a slot of {self._decoder.capacity}; raise capacity")


def check_options(max_tokens: Any, sampling: Any, **stop: Any) -> None:
    """Of a request. stop: by the name of the argument."""
    require_type(isinstance(max_tokens, Integral) and type(max_tokens) is not bool, "max_tokens", "an integer", max_tokens)
    require(max_tokens >= 0, "max_tokens", "0 or more", max_tokens)
    require_type(isinstance(sampling, Sampling | None), "sampling", "a Sampling", sampling)
    for name, ids in stop.items():
        valid = isinstance(ids, Collection) and all(isinstance(i, Integral) for i in ids)
        require_type(valid, name, "a collection of token ids", ids)


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
    slots: int = SLOTS,
) -> list[list[int]]:
    """The new tokens after each of several prompts, without the prompts.

    sampling, stop: see Engine.submit. first_sample: the index of the first prompt's sample; the others count from it.
    vocab_size, on_warning: see Engine. on_token(sample index, id): called for each new token, within a step in the order of the
    samples; returning True ends the sample after it. slots: how many run at once."""
    longest = max(map(len, prompts), default=0) + max_tokens
    engine = Engine(
        model,
        slots=max(1, min(slots, len(prompts))),
        capacity=longest,
        vocab_size=vocab_size,
        on_warning=on_warning,
    )
    options: dict[str, Any] = {"max_tokens": max_tokens, "sampling": sampling, "stop": stop}
    streams = {engine.submit(prompt, **options, sample=first_sample + i): i for i, prompt in enumerate(prompts)}
    samples: list[list[int]] = [[] for _ in prompts]
    while engine.busy:
        for stream in engine.step():
            i = streams[stream]
            for token in stream.take():
                samples[i].append(token)
                if on_token and on_token(first_sample + i, token):
                    stream.cancel()
                    break
    return samples
